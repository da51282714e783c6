"""The two ends of shared memory: where the buffers of a message are placed, and how the other end finds them."""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from asyncflow.errors import SchemaError
from asyncflow.storage.arena import ALIGN, Arena, Bytes, Region, Window, Writer, region_of
from asyncflow.storage.batch import Batch, Column
from asyncflow.storage.column import Values, bounds_of
from asyncflow.storage.frames import SMALL, Stream
from asyncflow.storage.schema import Schema, dtype
from asyncflow.types import Int64s

Place = tuple[int, int]


class OwnerMemory:
    """The end of the process that holds the queue, for one session."""

    stream: Stream | None = None

    def __init__(self, arena: Arena, writer: Writer, session: int) -> None:
        self._arena, self._writer, self._session = arena, writer, session

    def place(self, buffers: Sequence[Bytes]) -> list[Place]:
        """Pin buffers that lie in shared segments for the session, and copy the others into one."""
        places = [_lies(buffer) for buffer in buffers]
        copied, region = _copies(self._writer, [b for b, place in zip(buffers, places, strict=True) if place is None])
        if copied is None or (region is not None and not region.shared):
            return []
        fresh = iter(copied)
        found = [place or next(fresh) for place in places]
        for segment, _ in found:
            self._arena.pin(segment, self._session)
        return found

    def find(self, segment: int, offset: int, nbytes: int) -> Bytes:
        """Return what the session has written into a segment that was granted to it."""
        return self._arena.region(segment, offset, nbytes, self._session).array()


class ClientMemory:
    """The end of a client, for one message; what it placed is held until this object goes, once that is sent."""

    stream: Stream | None = None

    def __init__(self, window: Window, writer: Writer) -> None:
        self._window, self._writer = window, writer
        self._region: Region | None = None

    def place(self, buffers: Sequence[Bytes]) -> list[Place]:
        """Copy buffers into granted memory, but for those that were made there."""
        places = [_lies(buffer) if _own(buffer, self._writer) else None for buffer in buffers]
        others = [buffer for buffer, place in zip(buffers, places, strict=True) if place is None]
        copied, self._region = _copies(self._writer, others)
        if copied is None:
            return []
        fresh = iter(copied)
        return [place or next(fresh) for place in places]

    def find(self, segment: int, offset: int, nbytes: int) -> Bytes:
        """Return what the owner has placed and pinned."""
        return self._window.region(segment, offset, nbytes).array()


class Room:
    """Cells to be written in place: arrays in memory from which a put is sent without a copy.

    Once it is put, what is written into the arrays is undefined: let them go.
    """

    def __init__(self, schema: Schema, writer: Writer, cells: Mapping[str, int | Int64s]) -> None:
        """Make room for so many cells of each fixed column, and for cells of these lengths of each ragged one."""
        self._schema = schema
        counts = {name: _counts(name, number) for name, number in cells.items()}
        self._offsets = {name: bounds_of(number) for name, number in counts.items() if number.ndim}
        shapes = {name: self._shape(name, n) for name, n in cells.items()}
        items = {name: schema.dtype(name).item for name in cells}
        sizes = [items[name].itemsize * int(np.prod(shapes[name], dtype=object)) for name in cells]
        starts = laid(sizes)
        region = writer.take(starts[-1])
        memory = np.empty(starts[-1], np.uint8) if region is None else region.array()
        self._arrays: dict[str, Values] = {
            name: memory[start : start + size].view(items[name]).reshape(shapes[name])
            for name, start, size in zip(cells, starts, sizes, strict=False)
        }

    def _shape(self, name: str, cells: int | Int64s) -> tuple[int, ...]:
        kind = self._schema.dtype(name)
        if kind.ragged != bool(np.ndim(cells)):
            raise SchemaError(f"column {name!r} is {kind.name}: expected {'lengths' if kind.ragged else 'a number'}")
        return (int(self._offsets[name][-1] if kind.ragged else np.asarray(cells)), *kind.shape)

    def __getitem__(self, name: str) -> Values:
        """Return the values of a column, to be written: flat for a ragged one."""
        return self._arrays[name]

    def batch(self) -> Batch:
        """Return what was written as a batch, on the same memory."""
        return Batch(
            {
                name: Column(self._schema.dtype(name), array, self._offsets.get(name))
                for name, array in self._arrays.items()
            }
        )


def _counts(name: str, given: int | Int64s) -> Int64s:
    counts = np.asarray(given)
    if counts.ndim > 1 or (counts.size and (counts.dtype.kind not in "iu" or counts.min() < 0)):
        raise SchemaError(f"column {name!r}: expected a number of cells or their lengths, found {given!r}")
    return counts.astype(np.int64)


def keep(batch: Batch, writer: Writer) -> Batch:
    """Return a batch whose memory nobody else changes: a copy, but for what was made in the writer's own regions."""
    if batch.nbytes < SMALL:
        return batch.copy()
    buffers = [buffer for name in batch.names for buffer in batch[name].raw if not _own(buffer, writer)]
    starts = laid([buffer.size for buffer in buffers])
    region = writer.take(starts[-1]) if buffers else None
    if buffers and region is None:
        return batch.copy()
    memory = np.empty(0, np.uint8) if region is None else region.array()
    at = iter(starts)
    return Batch({name: _kept(batch[name], writer, memory, at) for name in batch.names}, len(batch))


def _kept(column: Column, writer: Writer, memory: Bytes, at: Iterator[int]) -> Column:
    values = _moved(column.values, writer, memory, at)
    return Column(
        dtype(column.dtype), values, None if column.offsets is None else _moved(column.offsets, writer, memory, at)
    )


def _moved(array: Values, writer: Writer, memory: Bytes, at: Iterator[int]) -> Values:
    if _own(array, writer):
        return array
    start = next(at)
    target = memory[start : start + array.nbytes]
    target[:] = array.reshape(-1).view(np.uint8)
    return target.view(array.dtype).reshape(array.shape)


def _lies(buffer: Bytes) -> Place | None:
    """Return the place of a buffer in a shared segment, if it can be sent as it is."""
    region = region_of(buffer)
    if region is None or not region.shared:
        return None
    offset = region.offset + int(buffer.__array_interface__["data"][0]) - region.address
    return (region.segment, offset) if offset % ALIGN == 0 else None


def _copies(writer: Writer, buffers: Sequence[Bytes]) -> tuple[list[Place] | None, Region | None]:
    """Copy buffers into one new region; None for the places if there is no memory."""
    if not buffers:
        return [], None
    starts = laid([buffer.size for buffer in buffers])
    region = writer.take(starts[-1])
    if region is None:
        return None, None
    target = region.array()
    for start, buffer in zip(starts, buffers, strict=False):
        target[start : start + buffer.size] = buffer
    return [(region.segment, region.offset + start) for start in starts[:-1]], region


def laid(sizes: Sequence[int]) -> list[int]:
    """Return where buffers begin that are laid one after another, and where the last ends."""
    starts: list[int] = bounds_of(np.array([size + -size % ALIGN for size in sizes], np.int64)).tolist()
    return starts


def _own(buffer: Bytes, writer: Writer) -> bool:
    region = region_of(buffer)
    return region is not None and writer.owns(region)
