"""The cells of one table: blocks of columns, and an index from row to (block, position) for each column.

A put is a block; nothing in a block ever changes, so views of it may be handed out. Rows of one group may
share a position, so a value common to a group is held once. A block is freed with the last of its rows, and
written anew without the dead ones when they are more than half of its bytes. A keeper may have the batch of
a block, or of several at once, lie elsewhere (see `spill`).
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from asyncflow.errors import CellConflict
from asyncflow.storage.batch import Batch, Column
from asyncflow.storage.column import Pick
from asyncflow.storage.rolling import Rolling
from asyncflow.types import Int64s

_PLACE_BITS = 26
_PLACE = (1 << _PLACE_BITS) - 1
_LITTLE = 1 << 20


class Block:
    """Columns of one put or write, the rows that use them, and where each row's cells lie."""

    __slots__ = ("batch", "dead", "key", "places", "rows", "spilled")

    def __init__(self, batch: Batch, rows: Int64s, places: Int64s, *, spilled: bool = False) -> None:
        self.batch, self.rows, self.places = batch, rows, places
        self.dead = self.key = 0
        self.spilled = spilled
        """Whether the cells are on the disk."""

    def copy(self) -> "Block":
        """Return the block as it stands; all that it refers to never changes."""
        block = Block(self.batch, self.rows, self.places)
        block.dead = self.dead
        return block


class Keeper(Protocol):
    """Decides which blocks stay in memory; called under the lock that guards the unit."""

    def came(self, unit: "Unit", block: Block) -> None:
        """Hear that a unit has a new block."""

    def used(self, blocks: Iterable[Block]) -> None:
        """Hear that cells of blocks were found for a reader."""

    def thinned(self, unit: "Unit", block: Block) -> None:
        """Hear that rows use less than half of a block that is on the disk."""

    def went(self, block: Block) -> None:
        """Hear that a block is not needed any more."""


class Cells:
    """Cells that were found but not copied yet.

    The blocks are held by reference and never change, so what is gathered later, without any lock, is what was
    found, whatever became of the rows meanwhile.
    """

    __slots__ = ("_batches", "_columns", "_places", "rows", "spilled")

    def __init__(
        self, blocks: dict[int, Block], places: list[tuple[Int64s, list[str]]], columns: list[str], rows: int
    ) -> None:
        self._batches, self._places, self._columns = {key: each.batch for key, each in blocks.items()}, places, columns
        self.rows = rows
        self.spilled = any(each.spilled for each in blocks.values())
        """Whether some lie on the disk."""

    @property
    def costly(self) -> bool:
        """Whether gathering may copy much, or wait for the disk.

        Much are several blocks, or cells that lie apart, and not a little of them.
        """
        size = sum(batch.nbytes for batch in self._batches.values())
        return self.spilled or (
            size > _LITTLE
            and (len(self._batches) > 1 or any(Pick(cells & _PLACE).range is None for cells, _ in self._places))
        )

    def gather(self) -> Batch:
        """Return the batch; consecutive rows of a block are a view."""
        found: dict[str, Column] = {}
        for cells, names in self._places:
            found.update(self._take(cells, names))
        return Batch.alike({name: found[name] for name in self._columns}, self.rows)

    def _take(self, cells: Int64s, names: list[str]) -> dict[str, Column]:
        blocks, places = cells >> _PLACE_BITS, cells & _PLACE
        if (blocks == blocks[0]).all():
            pick, batch = Pick(places), self._batches[int(blocks[0])]
            if pick.range == (0, len(batch)):
                return {name: batch[name] for name in names}
            return {name: batch[name].take(pick) for name in names}
        order = np.argsort(blocks, kind="stable")
        blocks, places = blocks[order], places[order]
        starts = np.flatnonzero(np.append(True, blocks[1:] != blocks[:-1])).tolist()
        parts = [
            (self._batches[int(blocks[start])], Pick(places[start:stop]))
            for start, stop in zip(starts, [*starts[1:], len(cells)], strict=True)
        ]
        back = None if (order[1:] > order[:-1]).all() else Pick(np.argsort(order))
        joined = {name: Column.concat([batch[name].take(pick) for batch, pick in parts]) for name in names}
        return joined if back is None else {name: column.take(back) for name, column in joined.items()}


class Unit:
    """Blocks and their index. Rows are those of the ledger, which decides what exists and who may read it."""

    def __init__(
        self, columns: Iterable[str], base: int = 0, keeper: Keeper | None = None, *, spare: bool = False
    ) -> None:
        """Tell `keeper` of all blocks; what is `spare` nobody reads as long as all goes well."""
        self._keeper, self.spare = keeper, spare
        self._blocks: dict[int, Block] = {}
        self._next_block = 1
        self._number = {name: number for number, name in enumerate(columns)}
        # By row and column: the number of the block, and the place in it in the lower bits. 0 is no block.
        self._index = Rolling(np.int64, base=base, width=len(self._number))
        self.nbytes = 0
        """Bytes of all blocks."""
        self.spilled = 0
        """Those of them that are on the disk."""
        self.saved = 0
        """Bytes that have gone so far because blocks on the disk were written anew without dead cells."""

    def admit(self, count: int) -> None:
        """Make room in the index for new rows."""
        self._index.grow(count)

    def reach(self, stop: int) -> None:
        """Make room in the index for all rows below `stop`."""
        self._index.grow(max(0, stop - self._index.stop))

    @property
    def base(self) -> int:
        """The first row that the index has room for."""
        return self._index.base

    def patterns(self, rows: Int64s) -> list[tuple[Int64s, list[str]]]:
        """Divide rows by the columns that they have here; those without any are left out."""
        rows = rows[(rows >= self._index.base) & (rows < self._index.stop)]
        has = self._index.at(rows) != 0
        kinds, which = np.unique(has, axis=0, return_inverse=True)
        names = np.array(list(self._number), object)
        return [(rows[which.reshape(-1) == at], names[kind].tolist()) for at, kind in enumerate(kinds) if kind.any()]

    def knows(self, rows: Int64s) -> bool:
        """Whether the index has room for rows."""
        return bool(np.all((rows >= self._index.base) & (rows < self._index.stop)))

    def put(self, rows: Int64s, batch: Batch, places: Int64s | None = None) -> None:
        """Store a batch for distinct rows, row i at place i unless told otherwise; the memory becomes the unit's."""
        if len(rows) == 0 or not batch.names:
            return
        self._store(Block(batch, rows, np.arange(len(rows)) if places is None else places))

    def fresh(self, rows: Int64s, batch: Batch) -> list[Int64s]:
        """Return for each column the places of the rows that have no cell yet; one with another value is refused."""
        return [self._lacking(rows, name, batch[name]) for name in batch.names]

    def _lacking(self, rows: Int64s, name: str, given: Column) -> Int64s:
        has = self._index.at(rows)[:, self._number[name]] != 0
        old = np.flatnonzero(has)
        if len(old):
            held = self.gather(rows[old], [name])[name]
            if not held.equals(given.take(old)):
                row = next(rows[i] for n, i in enumerate(old.tolist()) if not _same(held, n, given, i))
                raise CellConflict(f"row {row} has another value of {name!r}; cells never change")
        return np.flatnonzero(~has)

    def _store(self, block: Block) -> None:
        self._add(block, block.rows, block.places)

    def _add(self, block: Block, rows: Int64s, places: Int64s) -> None:
        """Store a block whose rows are these, but for dead ones."""
        key = block.key = self._next_block
        self._next_block += 1
        self._blocks[key] = block
        self.nbytes += block.batch.nbytes
        self.spilled += block.batch.nbytes * block.spilled
        cells = self._index.at(rows)
        cells[:, self._numbers(block.batch.names)] = ((key << _PLACE_BITS) | places)[:, None]
        self._index.put(rows, cells)
        if self._keeper is not None:
            self._keeper.came(self, block)

    def swap(self, block: Block, batch: Batch) -> bool:
        """Let the cells of a block be those of an equal batch on the disk, if the block is still there."""
        if self._blocks.get(block.key) is not block:
            return False
        block.batch, block.spilled = batch, True
        self.spilled += batch.nbytes
        return True

    def join(self, blocks: Sequence[Block], batch: Batch, rows: Int64s, places: Int64s) -> Block | None:
        """Let a batch on the disk stand for blocks, in which row i had what is at place i of it; return the new block.

        What has become of these blocks meanwhile does not matter: they only lose rows, and what they lost is left out.
        """
        keys = [block.key for block in blocks if self._blocks.get(block.key) is block]
        number = self._number[batch.names[0]]
        left = rows >= self._index.base
        left[left] = np.isin(self._index.at(rows[left])[:, number] >> _PLACE_BITS, keys)
        before = self.nbytes
        for key in keys:
            self._discard(key)
        joined = Block(batch, rows[left], places[left], spilled=True) if left.any() else None
        if joined is not None:
            self._store(joined)
        self.saved += before - self.nbytes
        return joined

    def blocks(self) -> list[Block]:
        """Return all blocks as they stand."""
        return [block.copy() for block in self._blocks.values()]

    def load(self, blocks: Iterable[Block], living: Callable[[Int64s], npt.NDArray[np.bool_]]) -> None:
        """Store blocks that may have dead rows; `living` tells which are not."""
        for block in blocks:
            alive = living(block.rows)
            self._add(block, block.rows[alive], block.places[alive])

    def _numbers(self, columns: Sequence[str]) -> list[int]:
        return [self._number[name] for name in columns]

    def locate(self, rows: Int64s, columns: Sequence[str]) -> "Cells":
        """Find cells in the order of the rows, all of them written, without looking into their blocks."""
        cells = self._index.at(rows)[:, self._numbers(columns)].T.copy()
        places = _alike(cells, list(columns))
        keys = {key for each, _ in places for key in _distinct(each >> _PLACE_BITS)}
        blocks = {key: self._blocks[key] for key in keys}
        if self._keeper is not None:
            self._keeper.used(blocks.values())
        return Cells(blocks, places, list(columns), len(rows))

    def gather(self, rows: Int64s, columns: Sequence[str]) -> Batch:
        """Return cells in the order of the rows, all of them written; consecutive rows of a block are a view."""
        return self.locate(rows, columns).gather()

    def widen(self, columns: Iterable[str]) -> None:
        """Make room for more columns."""
        for name in columns:
            self._number[name] = len(self._number)
        self._index.widen(len(self._number))

    def free(self, rows: Int64s) -> None:
        """Let the cells of rows go.

        A block is looked at only when half of its rows have gone since it was last, so that freeing a large
        one piece by piece costs a constant per row.
        """
        found = self._index.at(rows) >> _PLACE_BITS
        self._index.put(rows, 0)
        if len(rows) and (found == found[0]).all():  # what was put together mostly goes together
            for key in set(found[0].tolist()):
                if key:
                    self._lose(key, len(rows))
            return
        keys, counts = np.unique(found, return_counts=True)
        for key, count in zip(keys.tolist(), counts.tolist(), strict=True):
            if key:
                self._lose(key, count // len(self._blocks[key].batch.names))

    def _lose(self, key: int, count: int) -> None:
        block = self._blocks[key]
        block.dead += count
        if block.dead == len(block.rows):
            self._discard(key)
        elif block.dead * 2 > len(block.rows):
            self._shrink(key)

    def _shrink(self, key: int) -> None:
        """Forget the dead rows of a block, and write it anew if they used more than half of its bytes."""
        block = self._blocks[key]
        left = block.rows >= self._index.base
        number = self._number[block.batch.names[0]]
        left[left] = self._index.at(block.rows[left])[:, number] >> _PLACE_BITS == key
        block.rows, block.places, block.dead = block.rows[left], block.places[left], 0
        if self._keeper is not None and block.spilled:
            # By the number of cells: their lengths are on the disk, where nobody should wait under a lock.
            if len(np.unique(block.places)) * 2 < len(block.batch):
                self._keeper.thinned(self, block)
        elif _share(block) < 0.5:
            self._compact(key)

    def clear(self) -> None:
        """Let all blocks go, for good."""
        for key in list(self._blocks):
            self._discard(key)

    def _discard(self, key: int) -> None:
        block = self._blocks.pop(key)
        self.nbytes -= block.batch.nbytes
        self.spilled -= block.batch.nbytes * block.spilled
        if self._keeper is not None:
            self._keeper.went(block)

    def _compact(self, key: int) -> None:
        block = self._blocks[key]
        kept, places = np.unique(block.places, return_inverse=True)
        # A copy also where the take was a slice: a view would hold the memory of the whole block.
        batch = block.batch.take(kept).copy()
        self._discard(key)
        self._store(Block(batch, block.rows, places))

    def forget(self, row: int) -> None:
        """Let the index below a row go, which it may not have reached."""
        self.reach(row)
        self._index.forget(row)


def _alike(cells: Int64s, columns: list[str]) -> list[tuple[Int64s, list[str]]]:
    """Divide columns by where their cells lie: the way to those that were put together is found once."""
    if len(columns) and (cells == cells[0]).all():
        return [(cells[0], columns)]
    alike: dict[bytes, list[int]] = {}
    for at in range(len(columns)):
        alike.setdefault(cells[at].tobytes(), []).append(at)
    return [(cells[same[0]], [columns[at] for at in same]) for same in alike.values()]


def _distinct(keys: Int64s) -> list[int]:
    """Return the distinct keys; most cells lie in one block, or follow those of the same."""
    if (keys == keys[0]).all():
        return [int(keys[0])]
    found: list[int] = np.unique(keys[np.append(True, keys[1:] != keys[:-1])]).tolist()
    return found


def parts(rows: Int64s, batch: Batch, fresh: Sequence[Int64s]) -> list[tuple[Int64s, Batch]]:
    """Return what is to be stored of a batch, and for which rows: of each column the places that `fresh` names."""
    if all(len(places) == len(rows) for places in fresh):
        return [(rows, batch)]
    named = zip(batch.names, fresh, strict=True)
    return [(rows[places], batch.select([name]).take(places).copy()) for name, places in named if len(places)]


def _same(one: Column, at: int, other: Column, place: int) -> bool:
    return one.slice(at, at + 1).equals(other.slice(place, place + 1))


def _share(block: Block) -> float:
    """Return the share of a block's bytes that its rows still use."""
    kept = np.unique(block.places)
    used = total = 0
    for name in block.batch.names:
        column = block.batch[name]
        used += int(column.lengths[kept].sum()) * column.item_bytes
        total += column.values.nbytes
    return used / total if total else len(kept) / len(block.batch)
