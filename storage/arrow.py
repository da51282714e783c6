"""Batches as pyarrow RecordBatches and back; imported on use, since pyarrow costs 0.6 s.

A ragged column is a LargeList, a string a LargeString, bytes a LargeBinary, a dense cell a FixedSizeList.
The field's metadata holds the logical dtype, for Arrow lacks some: the bits of bfloat16 and float8 travel as
integers, and a complex number as its two parts.
"""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa

from asyncflow.errors import SchemaError
from asyncflow.storage.column import Column, Values
from asyncflow.storage.schema import DType, dtype

_KEY = b"asyncflow.dtype"
_PARTS = {"complex64": np.dtype("float32"), "complex128": np.dtype("float64")}


def record_batch(columns: Mapping[str, Column], rows: int) -> "pa.RecordBatch":
    """Return a RecordBatch on the buffers of the columns."""
    arrays = [_array(column) for column in columns.values()]
    fields = [
        pa.field(name, array.type, nullable=False, metadata={_KEY: columns[name].dtype.encode()})
        for name, array in zip(columns, arrays, strict=True)
    ]
    if not arrays:
        return pa.RecordBatch.from_struct_array(pa.array([{}] * rows, pa.struct([])))
    return pa.RecordBatch.from_arrays(arrays, schema=pa.schema(fields))


def columns(records: "pa.RecordBatch") -> dict[str, Column]:
    """Return the columns of a RecordBatch; nulls are refused, since a cell is written or it is not there."""
    return {field.name: _column(field, records.column(index)) for index, field in enumerate(records.schema)}


def _array(column: Column) -> "pa.Array":
    kind = dtype(column.dtype)
    if kind.kind in ("string", "bytes"):
        buffers = [None, pa.py_buffer(column.offsets), pa.py_buffer(column.values)]
        return pa.Array.from_buffers(
            pa.large_string() if kind.kind == "string" else pa.large_binary(), len(column), buffers
        )
    parts = _PARTS.get(kind.logical)
    values = pa.array(column.values.reshape(-1).view(parts or kind.item))
    shape = (*kind.shape, 2) if parts else kind.shape
    for axis in reversed(range(len(shape))):
        count = len(column.values) * math.prod(shape[:axis])
        values = pa.Array.from_buffers(pa.list_(values.type, shape[axis]), count, [None], children=[values])
    if kind.kind == "list":
        return pa.LargeListArray.from_arrays(pa.array(column.offsets), values)
    return values


def _column(field: "pa.Field", array: "pa.Array") -> Column:
    if array.null_count:
        raise SchemaError(f"column {field.name!r} has nulls")
    named = (field.metadata or {}).get(_KEY)
    kind = dtype(named.decode() if named else _name(array.type))
    if not kind.ragged:
        return Column.of(kind.name, _items(array, kind).reshape(len(array), *kind.shape))
    large = {"string": pa.large_string(), "bytes": pa.large_binary()}.get(kind.kind)
    array = array.cast(large or pa.large_list(array.type.value_type))
    offsets = _offsets(array)
    values = _raw(array) if large else _items(array.values, kind)
    if not large:
        values = values.reshape(-1, *kind.shape)
    return Column.ragged(values[offsets[0] : offsets[-1]], offsets - offsets[0], kind.name)


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


def _name(kind: "pa.DataType") -> str:
    """Return our name for an Arrow type that carries none."""
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        return "string"
    if pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
        return "bytes"
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return f"list<{_name(kind.value_type)}>"
    shape = []
    while pa.types.is_fixed_size_list(kind):
        shape.append(str(kind.list_size))
        kind = kind.value_type
    name = {"halffloat": "float16", "float": "float32", "double": "float64"}.get(str(kind), str(kind))
    return f"{name}[{','.join(shape)}]" if shape else name
