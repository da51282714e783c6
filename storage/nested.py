"""Columns of any Arrow type, such as `arrow<list<item: string>>`: structs, lists of lists, maps, with nulls in them.

A cell is bytes that stand for themselves, so that rows are taken, joined, sent and freed like those of `bytes`.
It holds what the row has of each of Arrow's buffers, in the order of the type, from the outside in:

    where nulls are allowed   one byte, whether there are any; if so, one byte a value, 0 for a null
    lists, maps, texts        a uint32 length of each, then the items or bytes
    numbers, times, decimals  the values; a bool is one byte
    structs                   field after field

All rows are turned at once by kernels of pyarrow, one pass over each buffer. Imported on use, like pyarrow.
"""

from collections.abc import Iterator
from functools import cache
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from asyncflow.errors import SchemaError
from asyncflow.storage.column import bounds_of
from asyncflow.types import Int64s

Bytes: TypeAlias = npt.NDArray[np.uint8]
# Bytes of all rows end to end, and where each row's begin and end.
Part: TypeAlias = tuple[Bytes, Int64s]

_MAX_LENGTH = 1 << 32
_MAX_SMALL = (1 << 31) - 1


def encode(array: "pa.Array") -> Part:
    """Return the cells of an array, and their offsets."""
    _least(array.type)
    parts = list(_parts(array, True, np.arange(len(array) + 1)))
    joined = pc.binary_join_element_wise(*(_binary(data, bounds) for data, bounds in parts), _EMPTY)
    offsets = _offsets(joined)
    return _buffer(joined, 2)[: offsets[-1]], offsets


def decode(kind: "pa.DataType", data: Bytes, offsets: Int64s) -> "pa.Array":
    """Return the array that the cells are made of; cells that are not of this type are a SchemaError."""
    reader = _Cells(data, offsets)
    array = _array(reader, kind, True, np.arange(len(offsets)))
    reader.finish()
    try:
        array.validate(full=True)
    except pa.ArrowInvalid as error:
        raise SchemaError(f"a cell is no {kind}: {error}") from error
    return array


_EMPTY = pa.scalar(b"", pa.large_binary())


def _parts(array: "pa.Array", nullable: bool, rows: Int64s) -> Iterator[Part]:
    """Yield what each row has of the buffers of an array; row i has its values rows[i] to rows[i + 1]."""
    kind = array.type
    if nullable:
        yield from _nulls(array, rows)
    elif array.null_count:
        raise SchemaError(f"nulls in a field of {kind} that allows none")
    if pa.types.is_boolean(kind):
        yield pc.fill_null(array, False).to_numpy(zero_copy_only=False).view(np.uint8), rows
    elif pa.types.is_struct(kind):
        for number, field in enumerate(kind):
            yield from _parts(array.field(number), field.nullable, rows)
    elif pa.types.is_fixed_size_list(kind):
        first, size = array.offset * kind.list_size, kind.list_size
        items = array.values.slice(first, len(array) * size)
        yield from _parts(items, kind.value_field.nullable, rows * size)
    elif _is_list(kind):
        yield from _items(_tight(array), rows)
    elif _is_text(kind):
        yield from _texts(_tight(array), rows)
    else:
        width = _width(kind)
        yield _buffer(array, 1)[array.offset * width : (array.offset + len(array)) * width], rows * width


def _nulls(array: "pa.Array", rows: Int64s) -> Iterator[Part]:
    count = len(rows) - 1
    if array.null_count == 0:
        yield np.zeros(count, np.uint8), np.arange(count + 1)
        yield np.zeros(0, np.uint8), np.zeros(count + 1, np.int64)
        return
    valid = array.is_valid().to_numpy(zero_copy_only=False)
    nulls = bounds_of((~valid).astype(np.int64))[rows]
    some = nulls[1:] > nulls[:-1]
    lengths = np.diff(rows)
    yield some.view(np.uint8), np.arange(count + 1)
    yield valid[np.repeat(some, lengths)].view(np.uint8), bounds_of(np.where(some, lengths, 0))


def _items(array: "pa.Array", rows: Int64s) -> Iterator[Part]:
    offsets = _offsets(array)
    yield _lengths(offsets), rows * 4
    nullable = False if pa.types.is_map(array.type) else array.type.value_field.nullable
    items = array.values.slice(offsets[0], offsets[-1] - offsets[0])
    yield from _parts(items, nullable, offsets[rows] - offsets[0])


def _texts(array: "pa.Array", rows: Int64s) -> Iterator[Part]:
    offsets = _offsets(array)
    yield _lengths(offsets), rows * 4
    yield _buffer(array, 2), offsets[rows]


def _tight(array: "pa.Array") -> "pa.Array":
    """Return the array without items or bytes under its nulls, which Arrow allows."""
    if array.null_count and np.diff(_offsets(array))[array.is_null().to_numpy(zero_copy_only=False)].any():
        return array.take(pa.array(np.arange(len(array))))
    return array


def _lengths(offsets: Int64s) -> Bytes:
    lengths = np.diff(offsets)
    if lengths.max(initial=0) >= _MAX_LENGTH:
        raise SchemaError(f"a list of {lengths.max()} items within a cell; at most {_MAX_LENGTH - 1}")
    return lengths.astype(np.uint32).view(np.uint8)


class _Cells:
    """Reads all cells at once, a part of each at a time; no more is made than there is in them."""

    def __init__(self, data: Bytes, offsets: Int64s) -> None:
        self._data, self._at, self._ends = data, offsets[:-1], offsets[1:]

    def take(self, lengths: Int64s) -> Bytes:
        """Return the next bytes of each cell, end to end."""
        ends = self._at + lengths
        if np.any(lengths < 0) or np.any(ends > self._ends):
            raise SchemaError("a cell ends within a value: it is damaged, or of another type")
        # Every other element is what lies between two of the wanted pieces.
        bounds = np.empty(2 * len(ends) + 1, np.int64)
        bounds[0:-1:2], bounds[1::2], bounds[-1] = self._at, ends, len(self._data)
        self._at = ends
        pieces = _binary(self._data, bounds).take(pa.array(np.arange(0, 2 * len(ends), 2)))
        return _buffer(pieces, 2)[: int(lengths.sum())]

    def expect(self, lengths: Int64s, least: int) -> None:
        """Refuse more values than the rest of a cell has room for, before anything is made for them."""
        # As floating-point numbers, since a forged product may pass the end of int64.
        if np.any(lengths * float(least) > self._ends - self._at):
            raise SchemaError("a cell has less than its values need: it is damaged, or of another type")

    def finish(self) -> None:
        if not np.array_equal(self._at, self._ends):
            raise SchemaError("a cell goes on after its value: it is damaged, or of another type")


def _array(cells: _Cells, kind: "pa.DataType", nullable: bool, rows: Int64s) -> "pa.Array":
    """Return the array whose values rows[i] to rows[i + 1] come next in cell i."""
    count, lengths = int(rows[-1]), np.diff(rows)
    cells.expect(lengths, _least(kind))
    valid = _validity(cells, lengths) if nullable else None
    buffers: list[Any] = [valid]
    children: list[pa.Array] = []
    if pa.types.is_boolean(kind):
        buffers.append(_bitmap(cells.take(lengths)))
    elif pa.types.is_struct(kind):
        children = [_array(cells, field.type, field.nullable, rows) for field in kind]
    elif pa.types.is_fixed_size_list(kind):
        children = [_array(cells, kind.value_type, kind.value_field.nullable, rows * kind.list_size)]
    elif _is_list(kind) or _is_text(kind):
        offsets = bounds_of(cells.take(lengths * 4).view(np.uint32).astype(np.int64))
        buffers.append(pa.py_buffer(_narrow(offsets, kind)))
        if _is_text(kind):
            buffers.append(pa.py_buffer(cells.take(np.diff(offsets[rows]))))
        else:
            children = [_array(cells, *_item(kind), offsets[rows])]
    else:
        buffers.append(pa.py_buffer(cells.take(lengths * _width(kind))))
    return pa.Array.from_buffers(kind, count, buffers, children=children or None)


def _validity(cells: _Cells, lengths: Int64s) -> "pa.Buffer | None":
    some = cells.take(np.ones(len(lengths), np.int64)) == 1
    marks = cells.take(np.where(some, lengths, 0))
    if len(marks) == 0:
        return None
    valid = np.ones(int(lengths.sum()), np.uint8)
    valid[np.repeat(some, lengths)] = marks
    return _bitmap(valid)


def _bitmap(marks: Bytes) -> "pa.Buffer":
    return pa.py_buffer(np.packbits(marks, bitorder="little"))


def _narrow(offsets: Int64s, kind: "pa.DataType") -> "Int64s | npt.NDArray[np.int32]":
    if kind.id in _LARGE:
        return offsets
    if offsets[-1] > _MAX_SMALL:
        raise SchemaError(f"{offsets[-1]} items or bytes in one {kind}; at most {_MAX_SMALL}: use its large_ kind")
    return offsets.astype(np.int32)


def _item(kind: "pa.DataType") -> "tuple[pa.DataType, bool]":
    if pa.types.is_map(kind):
        return pa.struct([kind.key_field, kind.item_field]), False
    return kind.value_type, kind.value_field.nullable


def _is_list(kind: "pa.DataType") -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_map(kind))


def _is_text(kind: "pa.DataType") -> bool:
    return kind in (pa.string(), pa.large_string(), pa.binary(), pa.large_binary())


_LARGE = {pa.large_string().id, pa.large_binary().id, pa.large_list(pa.int8()).id}


def _width(kind: "pa.DataType") -> int:
    if pa.types.is_dictionary(kind) or kind.num_buffers != 2 or kind.num_fields:
        raise SchemaError(f"no column holds the Arrow type {kind}: cast it to a plain one")
    return int(kind.bit_width) // 8


@cache
def _least(kind: "pa.DataType") -> int:
    """Return the bytes that a value has at least, leaving out what says whether it is null."""
    if pa.types.is_boolean(kind):
        return 1
    if pa.types.is_struct(kind):
        return sum(_least(field.type) for field in kind)
    if pa.types.is_fixed_size_list(kind):
        return int(kind.list_size) * _least(kind.value_type)
    if _is_list(kind) and _least(_item(kind)[0]) == 0:
        raise SchemaError(f"{kind}: the items of a list have at least one byte, so that a length can be checked")
    return 4 if _is_list(kind) or _is_text(kind) else _width(kind)


def _binary(data: Bytes, bounds: Int64s) -> "pa.Array":
    buffers = [None, pa.py_buffer(np.ascontiguousarray(bounds)), pa.py_buffer(np.ascontiguousarray(data))]
    return pa.Array.from_buffers(pa.large_binary(), len(bounds) - 1, buffers)


def _offsets(array: "pa.Array") -> Int64s:
    width = np.int64 if array.type.id in _LARGE else np.int32
    raw = array.buffers()[1]
    if raw is None or len(array) == 0:
        return np.zeros(1, np.int64)
    return np.frombuffer(raw, width)[array.offset : array.offset + len(array) + 1].astype(np.int64, copy=False)


def _buffer(array: "pa.Array", number: int) -> Bytes:
    raw = array.buffers()[number]
    return np.frombuffer(raw, np.uint8) if raw is not None else np.zeros(0, np.uint8)
