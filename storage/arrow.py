"""Batches as pyarrow RecordBatches and back; imported on use, since pyarrow costs 0.6 s.

A ragged column is a LargeList, a string a LargeString, bytes a LargeBinary, a dense cell a FixedSizeList.
Any other type is an `arrow<T>` column, the only kind that may have nulls.
The field's metadata holds the logical dtype, for Arrow lacks some: the bits of bfloat16 and float8 travel as
integers, and a complex number as its two parts.
"""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa

from asyncflow.errors import SchemaError
from asyncflow.storage import arrowtype, nested
from asyncflow.storage.column import Column, Values
from asyncflow.storage.schema import ITEMS, DType, dense, dtype

_KEY = b"asyncflow.dtype"
_PARTS: dict[str, np.dtype[np.generic]] = {"complex64": np.dtype("float32"), "complex128": np.dtype("float64")}


def record_batch(columns: Mapping[str, Column], rows: int) -> "pa.RecordBatch":
    """Return a RecordBatch on the buffers of the columns."""
    arrays = [array(column) for column in columns.values()]
    fields = [
        pa.field(name, each.type, nullable=each.null_count > 0, metadata={_KEY: columns[name].dtype.encode()})
        for name, each in zip(columns, arrays, strict=True)
    ]
    if not arrays:
        return pa.RecordBatch.from_struct_array(pa.array([{}] * rows, pa.struct([])))
    return pa.RecordBatch.from_arrays(arrays, schema=pa.schema(fields))


def columns(records: "pa.RecordBatch") -> dict[str, Column]:
    """Return the columns of a RecordBatch; nulls are refused, since a cell is written or it is not there."""
    return {field.name: _column(field, records.column(index)) for index, field in enumerate(records.schema)}


def nested_column(kind: DType, data: object) -> Column:
    """Return a column of `arrow<T>` from an array of that type, or from what pyarrow makes one of."""
    wanted = arrowtype.parse(kind.name)
    try:
        array = _joined(data) if isinstance(data, pa.Array | pa.ChunkedArray) else pa.array(data, wanted)
    except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
        raise SchemaError(f"the values do not fit a column of {kind.name}: {error}") from error
    if array.type != wanted:
        raise SchemaError(f"an array of {array.type} does not fit a column of {kind.name}: cast it first")
    return Column.ragged(*nested.encode(array), kind.name)


def array(column: Column) -> "pa.Array":
    """Return a pyarrow array on the buffers of a column; the cells of `arrow<T>` are turned into one."""
    kind = dtype(column.dtype)
    if kind.kind == "arrow" and column.offsets is not None:
        return nested.decode(arrowtype.parse(kind.name), column.values, column.offsets)
    if kind.kind in ("string", "bytes"):
        buffers = [None, pa.py_buffer(column.offsets), pa.py_buffer(column.values)]
        return pa.Array.from_buffers(
            pa.large_string() if kind.kind == "string" else pa.large_binary(), len(column), buffers
        )
    values = pa.array(column.values.reshape(-1).view(_PARTS.get(kind.logical, kind.item)))
    shape = (*kind.shape, 2) if kind.logical in _PARTS else kind.shape
    for axis in reversed(range(len(shape))):
        count = len(column.values) * math.prod(shape[:axis])
        values = pa.Array.from_buffers(pa.list_(values.type, shape[axis]), count, [None], children=[values])
    if kind.kind == "list":
        return pa.LargeListArray.from_arrays(pa.array(column.offsets), values)
    return values


def _column(field: "pa.Field", array: "pa.Array") -> Column:
    named = (field.metadata or {}).get(_KEY)
    try:
        return column(array, dtype(named.decode()) if named else None)
    except SchemaError as error:
        raise SchemaError(f"column {field.name!r}: {error}") from error


def column(data: "pa.Array | pa.ChunkedArray", kind: DType | None = None) -> Column:
    """Return a column of a pyarrow array, of the dtype that is nearest to its type unless told."""
    array = _joined(data)
    kind = kind or dtype(_name(array))
    if kind.kind == "arrow":
        return nested_column(kind, array)
    if array.null_count:
        raise SchemaError(f"it has nulls, which only a column of arrow<{array.type}> may have")
    if not kind.ragged:
        return Column.of(kind.name, _items(array, kind).reshape(len(array), *kind.shape))
    large = {"string": pa.large_string(), "bytes": pa.large_binary()}.get(kind.kind)
    array = array.cast(large or pa.large_list(array.type.value_type))
    offsets = _offsets(array)
    values = _raw(array) if large else _items(array.values, kind)
    if not large:
        values = values.reshape(-1, *kind.shape)
    return Column.ragged(values[offsets[0] : offsets[-1]], offsets - offsets[0], kind.name)


def _joined(data: "pa.Array | pa.ChunkedArray") -> "pa.Array":
    return data.combine_chunks() if isinstance(data, pa.ChunkedArray) else data


def _offsets(array: "pa.Array") -> Any:
    bounds = np.frombuffer(array.buffers()[1], np.int64) if array.buffers()[1] else np.zeros(1, np.int64)
    return bounds[array.offset : array.offset + len(array) + 1]


def _raw(array: "pa.Array") -> Values:
    data = array.buffers()[2]
    return np.frombuffer(data, np.uint8) if data else np.empty(0, np.uint8)


def _items(array: "pa.Array", kind: DType) -> Values:
    while pa.types.is_fixed_size_list(array.type):
        array = array.flatten()
    values: Values = array.to_numpy(zero_copy_only=False)
    if kind.logical in _PARTS:
        return values.view(kind.item)
    return values.astype(kind.item, copy=False) if kind.item == np.bool_ else values


def _name(array: "pa.Array") -> str:
    """Return our name for the type of an array that carries none; `arrow<T>` where there is no other."""
    kind = array.type
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        return "string"
    if pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
        return "bytes"
    if not (pa.types.is_list(kind) or pa.types.is_large_list(kind)):
        return _dense(array) or arrowtype.name(kind)
    items = _dense(array.values)
    plain = items is not None and not array.values.null_count and 0 not in dtype(items).shape
    return f"list<{items}>" if plain else arrowtype.name(kind)


def _dense(array: "pa.Array") -> str | None:
    """Return the dtype of numbers of a fixed shape without nulls within it."""
    shape, items, nulls = [], array, 0
    while pa.types.is_fixed_size_list(items.type):
        shape.append(items.type.list_size)
        items = items.flatten()
        nulls += items.null_count
    name = {"halffloat": "float16", "float": "float32", "double": "float64"}.get(str(items.type), str(items.type))
    return dense(name, tuple(shape)).name if name in ITEMS and not nulls else None
