"""Keeps the cells of one process below a limit of memory: what is above it moves to a local disk.

One `Spill` hears of the blocks of all units of its process. Above the limit it chooses blocks, writes them to a file
(`sheet`), and lets the units have the batches that lie there instead. Choosing and replacing happen under the lock
that guards the units, writing does not. Who has found cells before keeps those that were found.

What is chosen: copies of other units' rows; then what was read, that which was not for longest before the others; then
what was not read, the newest first, since a fifo consumer wants the oldest. Blocks are written some megabytes at a
time, and those of one unit with the same columns become one, so that many small puts need few files, mappings and
objects. A file of which less than half is needed, and a block of which less than half is, are written anew.

Until `start` there is no thread: whoever stores a block above the limit writes to the disk first.
"""

import itertools
import logging
import os
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TypeAlias

import numpy as np

from asyncflow.errors import StorageError
from asyncflow.storage import sheet
from asyncflow.storage.batch import Batch, Column
from asyncflow.storage.column import Pick, bounds_of
from asyncflow.storage.status import MemoryStatus
from asyncflow.storage.unit import Block, Unit
from asyncflow.types import Int64s

log = logging.getLogger(__name__)

PIECE = 16 << 20
"""Bytes that are written at a time, unless a block has more."""
_ROWS = 1 << 16
"""Rows whose places may change at a time, under the lock."""
_RETRY = 5.0
"""Seconds until a disk that could not be written is tried again."""

_Blocks: TypeAlias = dict[Block, Unit]


class Spill:
    """The blocks of one process, in memory and on the disk; all but `close` is called under the lock of the units."""

    def __init__(self, limit: int, folder: Path) -> None:
        """Keep at most so many bytes in memory, and the others in a folder, which is made (StorageError)."""
        if limit < 1:
            raise StorageError(f"a limit of memory is at least 1 byte, not {limit}")
        try:
            sheet.check(folder)
        except OSError as error:
            raise StorageError(
                f"cells cannot be spilled to {folder}: {error}; name a folder on a local disk"
            ) from error
        self.limit, self.folder = limit, folder
        self.memory = self.spilled = 0
        """Bytes in memory, and on the disk."""
        self.trouble = ""
        self._spare: _Blocks = {}
        self._read: _Blocks = {}
        self._unread: _Blocks = {}
        self._thin: _Blocks = {}
        self._sheets: dict[Block, _Sheet] = {}
        self._awaited = self._closed = False
        self._again = 0.0
        self._alarm = threading.Condition()
        self._changed: Callable[[], None] = lambda: None
        self._thread: threading.Thread | None = None

    @classmethod
    def chosen(cls, limit: int | None, folder: "str | os.PathLike[str] | None") -> "Spill | None":
        """Return what was chosen: a limit and a folder, or neither."""
        if (limit is None) != (folder is None):
            raise StorageError(
                f"a memory limit of {limit} bytes needs a folder to spill to"
                if folder is None
                else f"cells are spilled to {folder} above a memory limit: name that, too"
            )
        return None if limit is None or folder is None else cls(limit, Path(folder).absolute())

    def start(self, lock: "threading.Lock | threading.RLock", changed: Callable[[], None]) -> None:
        """Write in a thread from now on; `changed` is called under the lock when puts may fit that did not."""
        self._alarm, self._changed = threading.Condition(lock), changed
        self._thread = threading.Thread(target=self._run, name="asyncflow-spill", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End, and forget all blocks; idempotent. The lock must be free."""
        with self._alarm:
            self._closed = True
            self._alarm.notify_all()
            for blocks in (self._spare, self._read, self._unread, self._thin, self._sheets):
                blocks.clear()
        if self._thread is not None:
            self._thread.join()

    def fits(self, nbytes: int) -> bool:
        """Whether a put may come into memory: nothing is above the limit, or not more than a quarter with it."""
        fits = self.memory <= self.limit or self.memory + nbytes <= self.limit + self.limit // 4
        self._awaited |= not fits
        return fits

    @property
    def status(self) -> MemoryStatus:
        """How much is where."""
        return MemoryStatus(self.memory, self.spilled, self.limit, str(self.folder), self.trouble)

    def __str__(self) -> str:
        disk = f"cannot be written: {self.trouble}" if self.trouble else "is behind"
        return f"{self.memory} of {self.limit} bytes of memory are used, and the disk at {self.folder} {disk}"

    # What units tell

    def came(self, unit: Unit, block: Block) -> None:
        """Hear that a unit has a new block."""
        if self._closed or block.spilled or block.batch.nbytes == 0:
            return
        self.memory += block.batch.nbytes
        (self._spare if unit.spare else self._unread)[block] = unit
        if self.memory <= self.limit:
            return
        if self._thread is not None:
            self._alarm.notify()
        else:
            while not self.trouble and (moves := self._choose()):
                self._move(moves)

    def used(self, blocks: Iterable[Block]) -> None:
        """Hear that cells of blocks were found for a reader."""
        for block in blocks:
            unit = self._unread.pop(block, None) or self._read.pop(block, None)
            if unit is not None:
                self._read[block] = unit

    def thinned(self, unit: Unit, block: Block) -> None:
        """Hear that rows use less than half of a block that is on the disk."""
        self._thin[block] = unit
        self._rouse()

    def went(self, block: Block) -> None:
        """Hear that a block is not needed any more."""
        self._forget(block)
        self._thin.pop(block, None)
        found = self._sheets.pop(block, None)
        if found is not None:
            self.spilled -= block.batch.nbytes
            self._again = 0.0
            self._look(found.without(block))
        if self._awaited or (found is not None and self.trouble):
            self._rouse()

    def _forget(self, block: Block) -> None:
        """Count a block no longer among those in memory, if it is one."""
        for blocks in (self._spare, self._read, self._unread):
            if blocks.pop(block, None) is not None:
                self.memory -= block.batch.nbytes

    def _rouse(self) -> None:
        if self._thread is not None:
            self._alarm.notify()

    def _look(self, found: "_Sheet") -> None:
        """Have what is left of a file written anew if it is less than half."""
        if found.blocks and found.needed * 2 < found.size:
            self._thin.update(found.blocks)
            self._rouse()

    # The thread

    def _run(self) -> None:
        while moves := self._next():
            self._move(moves)

    def _next(self) -> "list[_Move]":
        """Wait for blocks that are to be written; none when this is over."""
        with self._alarm:
            while not self._closed:
                if self._awaited and self.fits(0):
                    self._tell()
                pause = self._again - time.monotonic() if self.trouble else 0.0
                moves = [] if pause > 0 else self._choose()
                if moves:
                    return moves
                self._alarm.wait(pause if pause > 0 else None)
        return []

    def _order(self) -> Iterator[tuple[Block, Unit]]:
        """Return the blocks in memory, those first that will not be missed soon."""
        return itertools.chain(self._spare.items(), self._read.items(), reversed(self._unread.items()))

    def _choose(self) -> "list[_Move]":
        """Choose what is written next, to one file."""
        # A little more than must be, so that not every put at the limit makes a file.
        above = self.memory - self.limit + self.limit // 8 if self.memory > self.limit else 0
        parts = [_Part.of(unit, block) for block, unit in _first(self._order(), min(above, PIECE))]
        parts += [_Part.of(unit, block, thin=True) for block, unit in _first(self._thin.items(), PIECE)]
        alike: dict[tuple[int, tuple[str, ...]], list[_Part]] = {}
        for part in sorted(parts, key=lambda part: part.block.key):
            alike.setdefault((id(part.unit), part.batch.names), []).append(part)
        return [_Move(each) for each in alike.values()]

    def _move(self, moves: "list[_Move]") -> None:
        """Write blocks, and let their units have what was written."""
        try:
            batches, size = sheet.write(moves, self.folder)
            for move in moves:
                move.prepare()
            with self._alarm:
                self.trouble = ""
                self._replace(moves, batches, size)
                self._tell()
        except OSError as error:
            self._failed(str(error))
        except Exception as error:
            # A border: without this thread puts would wait for ever.
            log.exception("cells could not be written to %s", self.folder)
            self._failed(f"{type(error).__name__}: {error}")

    def _failed(self, trouble: str) -> None:
        with self._alarm:
            if not self.trouble:
                log.warning("cells stay in memory above their limit: %s cannot be written: %s", self.folder, trouble)
            self.trouble = trouble
            self._again = time.monotonic() + _RETRY
            self._tell()

    def _replace(self, moves: "list[_Move]", batches: list[Batch], size: int) -> None:
        if self._closed:
            return
        found = _Sheet(size)
        for move, batch in zip(moves, batches, strict=True):
            unit, blocks = move.unit, [part.block for part in move.parts]
            if move.whole:
                block = blocks[0] if unit.swap(blocks[0], batch) else None
            else:
                block = unit.join(blocks, batch, move.rows, move.places)
            if block is not None:
                self._forget(block)
                self._sheets[block] = found
                self.spilled += batch.nbytes
                found.add(block, unit)
        self._look(found)

    def _tell(self) -> None:
        self._awaited = False
        try:
            if not self._closed:
                self._changed()
        except Exception:
            # A border, as in `_move`.
            log.exception("what waited for memory could not go on")


@dataclass(slots=True, eq=False)
class _Sheet:
    """A file, the blocks in it, and how many of its bytes they need."""

    size: int
    needed: int = 0
    blocks: _Blocks = field(default_factory=dict)

    def add(self, block: Block, unit: Unit) -> None:
        self.blocks[block] = unit
        self.needed += block.batch.nbytes

    def without(self, block: Block) -> "_Sheet":
        del self.blocks[block]
        self.needed -= block.batch.nbytes
        return self


@dataclass(frozen=True, slots=True)
class _Part:
    """A block as it is when it is chosen, and the cells of it that are written."""

    unit: Unit
    block: Block
    batch: Batch
    rows: Int64s
    places: Int64s
    thin: bool
    """Whether only the cells are written that rows still use."""

    @classmethod
    def of(cls, unit: Unit, block: Block, *, thin: bool = False) -> "_Part":
        return cls(unit, block, block.batch, block.rows, block.places, thin)


class _Move:
    """Blocks of one unit with the same columns, which become one."""

    def __init__(self, parts: list[_Part]) -> None:
        self.parts, self.unit, self.names = parts, parts[0].unit, parts[0].batch.names

    def prepare(self) -> None:
        """Find the places while nobody waits for it."""
        if not self.whole:
            _ = self.rows, self.places

    @property
    def whole(self) -> bool:
        """Whether this is one block as it is."""
        return len(self.parts) == 1 and not self.parts[0].thin

    @cached_property
    def _kept(self) -> list[Int64s | None]:
        """The cells of each part that are written; None for all."""
        return [np.unique(part.places) if part.thin else None for part in self.parts]

    @cached_property
    def rows(self) -> Int64s:
        """The rows of all parts."""
        return np.concatenate([part.rows for part in self.parts])

    @cached_property
    def places(self) -> Int64s:
        """Where each row lies in what is written."""
        kept = list(zip(self.parts, self._kept, strict=True))
        starts = bounds_of(np.array([len(part.batch if cells is None else cells) for part, cells in kept]))
        found = [part.places if cells is None else np.searchsorted(cells, part.places) for part, cells in kept]
        return np.concatenate([places + start for places, start in zip(found, starts.tolist(), strict=False)])

    def column(self, name: str) -> Iterator[Column]:
        """Return the cells of a column, copied at most so many bytes at a time."""
        for part, kept in zip(self.parts, self._kept, strict=True):
            column = part.batch[name]
            if kept is None:
                yield column
            else:
                pieces = np.array_split(kept, -(-column.nbytes // PIECE) or 1)
                yield from (column.take(Pick(piece)) for piece in pieces)


def size_of(text: str) -> int:
    """Return the bytes that a text such as 8GiB, 500 MB or 1000000 names (StorageError)."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(?:([kKMGT])(i?)B?|B)?\s*", text)
    if found is None:
        raise StorageError(f"{text!r} is no number of bytes: expected one such as 8GiB, 500MB or 1000000")
    unit = 1024 if found[3] else 1000
    return int(float(found[1]) * unit ** (" kMGT".index(found[2].replace("K", "k")) if found[2] else 0))


def _first(blocks: Iterable[tuple[Block, Unit]], nbytes: int) -> Iterator[tuple[Block, Unit]]:
    """Return the first blocks that have so many bytes; a large one alone, and few enough rows."""
    size = rows = 0
    for block, unit in blocks:
        if size >= nbytes or (size and (block.batch.nbytes >= PIECE or rows + len(block.rows) > _ROWS)):
            return
        size, rows = size + block.batch.nbytes, rows + len(block.rows)
        yield block, unit
