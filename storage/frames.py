"""A batch as a layout and raw buffers.

The buffers of all columns follow in order, values before offsets. Those below `SMALL` bytes are joined in the
first frame, each at a multiple of 8. A larger one lies in memory that both ends map, and then only its place is
sent; or it crosses a bulk connection (`bulk`), and its place is where it lies there; or it is a frame of its own and
is never copied here. Of more than `MAX_FRAME` bytes it is cut into frames of that size and a rest, which the receiver
joins: there it costs a copy. The sizes that the layout claims are compared with the frames before anything is made
of them.
"""

import itertools
from collections.abc import Iterator, Sequence
from typing import Protocol, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt
import xxhash

from asyncflow.errors import SchemaError, WireError
from asyncflow.storage.batch import Batch, Column
from asyncflow.storage.column import Values
from asyncflow.storage.schema import MAX_COLUMNS, DType, dtype

SMALL = 32 << 10
MAX_FRAME = 1 << 30
MAX_ROWS = 1 << 26

Buffer: TypeAlias = bytes | memoryview
Bytes: TypeAlias = npt.NDArray[np.uint8]


class ColumnLayout(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One column: its dtype and the bytes of its values; offsets have 8 × (rows + 1)."""

    name: str
    dtype: str
    bytes: int


class Stream(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Buffers that wait to be fetched over bulk connections by who names the token."""

    token: bytes
    bytes: int
    parts: int


class Layout(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The columns of a batch, and the xxh3 of all frames; what lies in shared memory crosses no wire."""

    rows: int
    columns: list[ColumnLayout]
    checksum: int
    places: list[tuple[int, int]] = []
    """Segment or transfer, and offset there, of each large buffer, where they are not frames."""
    stream: Stream | None = None
    """How large buffers are fetched that are still where they were."""


class Memory(Protocol):
    """Memory that both ends of a connection map, or that bulk connections fill."""

    stream: Stream | None
    """How the other end fetches what was placed, if it cannot see it."""

    def place(self, buffers: Sequence[Bytes]) -> list[tuple[int, int]]:
        """Return where buffers lie, after they have been copied there if need be; none if there is no room."""

    def find(self, segment: int, offset: int, nbytes: int) -> Bytes:
        """Return what the other end has placed; a WireError if there is nothing."""


def large(batch: Batch) -> list[Bytes]:
    """Return the buffers that are not joined."""
    return [buffer for name in batch.names for buffer in batch[name].raw if buffer.size >= SMALL]


def large_sizes(layout: Layout) -> list[int]:
    """Return the bytes of each buffer that is not joined."""
    return [size for size in _listed(layout) if size >= SMALL]


def pack(batch: Batch, memory: Memory | None = None) -> tuple[Layout, list[Buffer]]:
    """Return layout and frames; large frames are views of the batch."""
    buffers: list[Bytes] = []
    columns = []
    for name in batch.names:
        column = batch[name]
        columns.append(ColumnLayout(name, column.dtype, column.values.nbytes))
        buffers += column.raw
    small = _joined([buffer.data for buffer in buffers if buffer.size < SMALL])
    large = [buffer for buffer in buffers if buffer.size >= SMALL]
    places = memory.place(large) if large and memory is not None else []
    cut = () if places else (piece for buffer in large for piece in _cut(buffer.data))
    frames: list[Buffer] = [small, *cut]
    stream = memory.stream if places and memory is not None else None
    return Layout(len(batch), columns, _checksum(frames), places, stream), frames


def unpack(layout: Layout, frames: Sequence[Buffer], memory: Memory | None = None) -> Batch:
    """Return the batch on the memory of its frames; any contradiction is a WireError."""
    sizes = _listed(layout)
    buffers = _split(sizes, frames, _found(sizes, layout.places, memory))
    if _checksum(frames) != layout.checksum:
        raise WireError("a batch does not match its checksum")
    try:
        shared = bool(layout.places)
        columns = {column.name: _column(column, layout.rows, buffers, shared) for column in layout.columns}
        return Batch(columns, layout.rows)
    except SchemaError as error:
        raise WireError(str(error)) from error


def _listed(layout: Layout) -> list[int]:
    """Return the bytes of each buffer."""
    if not 0 <= layout.rows <= MAX_ROWS or len(layout.columns) > MAX_COLUMNS:
        raise WireError(f"a batch of {layout.rows} rows and {len(layout.columns)} columns")
    try:
        return [size for column in layout.columns for size in _sizes(column, layout.rows)]
    except SchemaError as error:
        raise WireError(str(error)) from error


def _cut(buffer: memoryview) -> list[memoryview]:
    return [buffer[at : at + MAX_FRAME] for at in range(0, len(buffer), MAX_FRAME)]


def _pieces(size: int) -> Iterator[int]:
    """Return the bytes of each frame of a large buffer."""
    yield from itertools.repeat(MAX_FRAME, size // MAX_FRAME)
    if size % MAX_FRAME:
        yield size % MAX_FRAME


def _joined(buffers: list[memoryview]) -> bytes:
    parts: list[Buffer] = []
    for buffer in buffers:
        parts += (buffer, bytes(-len(buffer) % 8))
    return b"".join(parts)


def _checksum(frames: Sequence[Buffer]) -> int:
    digest = xxhash.xxh3_64()
    for frame in frames:
        digest.update(frame)
    return digest.intdigest()


def _sizes(column: ColumnLayout, rows: int) -> Iterator[int]:
    """Return the bytes of each buffer of a column."""
    kind = dtype(column.dtype)
    whole = column.bytes % kind.nbytes == 0 if kind.ragged else column.bytes == rows * kind.nbytes
    if column.bytes < 0 or not whole:
        raise WireError(f"column {column.name!r}: {column.bytes} bytes for {rows} rows of {kind.name}")
    yield column.bytes
    if kind.ragged:
        yield 8 * (rows + 1)


def _found(sizes: list[int], places: list[tuple[int, int]], memory: Memory | None) -> list[Buffer] | None:
    """Return the large buffers that lie in shared memory; None if they are frames."""
    if not places:
        return None
    large = [size for size in sizes if size >= SMALL]
    if memory is None or len(places) != len(large):
        raise WireError(f"{len(places)} places in shared memory for {len(large)} buffers")
    return [memory.find(*place, size).data for place, size in zip(places, large, strict=True)]


def _split(sizes: list[int], frames: Sequence[Buffer], placed: list[Buffer] | None) -> Iterator[Buffer]:
    """Return the buffers, after the claimed sizes have been compared with the frames."""
    small = sum(size + -size % 8 for size in sizes if size < SMALL)
    large = [size for size in sizes if size >= SMALL] if placed is None else []
    found = [len(frame) for frame in frames]
    # A forged size could ask for any number of pieces: they are not listed before the sum is that of the frames.
    if small + sum(large) != sum(found):
        raise WireError(f"frames of {sum(found)} bytes where the columns of the layout have {sizes}")
    wanted = [small, *(piece for size in large for piece in _pieces(size))]
    if wanted != found:
        raise WireError(f"frames of {found} bytes where the layout has {wanted}")
    rest = iter(frames[1:])
    whole = iter(placed) if placed is not None else (_whole(size, rest) for size in large)
    return _walk(sizes, memoryview(frames[0]), whole)


def _walk(sizes: list[int], joined: memoryview, large: Iterator[Buffer]) -> Iterator[Buffer]:
    at = 0
    for size in sizes:
        if size >= SMALL:
            yield next(large)
        else:
            yield joined[at : at + size]
            at += size + -size % 8


def _whole(size: int, pieces: Iterator[Buffer]) -> Buffer:
    if size <= MAX_FRAME:
        return next(pieces)
    whole, at = np.empty(size, np.uint8), 0
    for piece in itertools.islice(pieces, -(-size // MAX_FRAME)):
        whole[at : at + len(piece)] = np.frombuffer(piece, np.uint8)
        at += len(piece)
    return whole.data


def _column(layout: ColumnLayout, rows: int, buffers: Iterator[Buffer], shared: bool) -> Column:
    kind = dtype(layout.dtype)
    values = _values(next(buffers), kind)
    if not kind.ragged:
        return Column(kind, values.reshape(rows, *kind.shape))
    bounds = np.frombuffer(next(buffers), np.int64)
    # The other end could change what lies in shared memory after it was checked: harmless in values, not in bounds.
    bounds = bounds.copy() if shared else _aligned(bounds)
    column = Column.ragged(values.reshape(-1, *kind.shape), bounds, kind.name)
    if kind.kind == "string":
        _check_text(column)
    return column


def _values(buffer: Buffer, kind: DType) -> Values:
    if kind.item == np.bool_ and np.any(np.frombuffer(buffer, np.uint8) > 1):
        raise WireError("a bool that is neither 0 nor 1")
    return _aligned(np.frombuffer(buffer, kind.item))


def _aligned(values: Values) -> Values:
    # A frame may start anywhere in the buffer it was received in.
    return values if values.flags.aligned else values.copy()


def _check_text(column: Column) -> None:
    """Refuse bytes that are not UTF-8, and strings that begin within a character."""
    try:
        str(column.buffers[0], "utf-8")
    except UnicodeDecodeError as error:
        raise WireError(f"a string column is not UTF-8: {error}") from error
    offsets = column.offsets
    starts = offsets[:-1][offsets[:-1] < len(column.values)] if offsets is not None else ()
    if np.any(column.values[starts] & 0xC0 == 0x80):
        raise WireError("a string begins within a character")
