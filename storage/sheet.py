"""Cells in a file: written once, then mapped and read where they lie.

A file has no name in its folder from the beginning, so nothing is left of it when its last array goes, nor when its
process is killed. (Where a file system has no such files, it has one for a moment; what is left then goes with the
next process that uses the folder.) It is on the disk before it is mapped: memory is let go only for what can be read
again.

The layout is that of columns in memory, values before offsets, each at a multiple of 8, and is told by nobody but the
arrays: no other process ever reads such a file. pyarrow maps it, and keeps no descriptor open, of which a process has
few; numpy reads from it without a copy.
"""

import os
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from io import BufferedWriter
from pathlib import Path
from typing import Protocol

import numpy as np

from asyncflow.storage.arena import Bytes
from asyncflow.storage.batch import Batch, Column
from asyncflow.storage.column import Values, bounds_of
from asyncflow.storage.schema import DType, dtype

_ALIGN = 8
_PREFIX = ".asyncflow-spill-"


class Source(Protocol):
    """What becomes a batch in a file."""

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the columns, at least one."""

    def column(self, name: str) -> Iterator[Column]:
        """Return the cells of a column, piece by piece, at least one piece."""


@dataclass(frozen=True, slots=True)
class _Span:
    """Where a column lies in a file."""

    kind: DType
    cells: int
    start: int
    stop: int
    bounds: int
    """Where its offsets begin, if it has some."""

    def column(self, memory: Bytes) -> Column:
        values = memory[self.start : self.stop].view(self.kind.item)
        if not self.kind.ragged:
            return Column(self.kind, values.reshape(self.cells, *self.kind.shape))
        bounds = memory[self.bounds : self.bounds + 8 * (self.cells + 1)].view(np.int64)
        return Column(self.kind, values.reshape(-1, *self.kind.shape), bounds)


class _Writer:
    """A file, and how much of it is written."""

    def __init__(self, file: BufferedWriter) -> None:
        self._file, self.at = file, 0

    def write(self, array: Values) -> None:
        if array.size:
            self._file.write(array.reshape(-1).view(np.uint8).data)
            self.at += array.nbytes

    def align(self) -> int:
        self.at += self._file.write(bytes(-self.at % _ALIGN))
        return self.at

    def lay(self, pieces: Iterator[Column]) -> _Span:
        start, lengths, kind, cells = self.align(), [], None, 0
        for piece in pieces:
            kind, cells = dtype(piece.dtype), cells + len(piece)
            self.write(piece.values)
            if kind.ragged:
                lengths.append(piece.lengths)
        assert kind is not None
        stop, bounds = self.at, self.align()
        if kind.ragged:
            self.write(bounds_of(np.concatenate(lengths)))
        return _Span(kind, cells, start, stop, bounds)


def write(sources: Sequence[Source], folder: Path) -> tuple[list[Batch], int]:
    """Write batches to one new file in a folder; return them as they lie there, and its size (OSError)."""
    with _created(folder) as file:
        writer = _Writer(file)
        laid = [{name: writer.lay(source.column(name)) for name in source.names} for source in sources]
        writer.align()
        file.flush()
        os.fdatasync(file.fileno())
        memory = _mapped(file.fileno())
    return [Batch({name: span.column(memory) for name, span in spans.items()}) for spans in laid], writer.at


def check(folder: Path) -> None:
    """Make a folder, see that files can be made in it, and remove what a process left that was killed (OSError)."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in folder.glob(f"{_PREFIX}*"):
        path.unlink(missing_ok=True)  # none keeps its name for longer than it takes to remove it
    with _created(folder):
        pass


@contextmanager
def _created(folder: Path) -> Iterator[BufferedWriter]:
    with open(_nameless(folder), "wb") as file:
        yield file


def _nameless(folder: Path) -> int:
    """Open a new file that only this process can reach."""
    with suppress(OSError):
        return os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    # Not every file system has such files: this one is without a name as soon as it is made.
    path = folder / f"{_PREFIX}{secrets.token_hex(8)}"
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        path.unlink(missing_ok=True)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _mapped(descriptor: int) -> Bytes:
    import pyarrow as pa

    # The mapping outlives the file object, as long as there are arrays on it.
    with pa.memory_map(f"/proc/self/fd/{descriptor}") as file:
        return np.frombuffer(file.read_buffer(), np.uint8)
