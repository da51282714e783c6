"""Fields of the key-value facade as cells of `bytes`, and back.

A field appears whenever somebody puts it, with any dtype; a table has the columns that it was created with. So
a cell is the raw bytes of its values, and a spec says how to read them: one number, rows of a fixed shape, a
string, or a plain value (dict, list, number, None) in MessagePack. Nothing is ever pickled. Arrays and jagged
tensors go in and out as whole buffers; only lists are looked at value by value.
"""

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Literal, cast

import msgspec
import numpy as np

from asyncflow.errors import SchemaError
from asyncflow.storage.column import Column, Values
from asyncflow.storage.schema import ITEMS, dtype
from asyncflow.types import Int64s

if TYPE_CHECKING:
    import torch


class Spec(msgspec.Struct, frozen=True):
    """How the cells of a field are read."""

    kind: Literal["number", "rows", "string", "value"]
    item: str = "uint8"
    """Dtype of one number."""
    tail: tuple[int, ...] = ()
    """Shape of one row of a cell of `rows`: a sequence of tokens has rows of shape ()."""

    def __str__(self) -> str:
        shape = f" of shape {self.tail}" if self.tail else ""
        return f"{self.item} {self.kind}{shape}" if self.kind in ("number", "rows") else f"a {self.kind}"


class Fields(dict[str, Any]):
    """What a read returns where tensordict is not installed.

    Numbers are an array (n,), sequences of one length an array (n, length, …), of several lengths a list of
    arrays; strings and plain values are lists. bfloat16 comes as its bits in uint16.
    """

    def __init__(self, columns: Mapping[str, Any], rows: int) -> None:
        super().__init__(columns)
        self.batch_size = (rows,)


def encode(name: str, data: object) -> tuple[Spec, Column]:
    """Return the spec of a field and its cells."""
    try:
        spec, cells = _encoded(data)
    except (SchemaError, msgspec.MsgspecError, TypeError, OverflowError) as error:
        raise SchemaError(f"field {name!r}: {error}; arrays, tensors, strings and plain values are kept") from error
    if 0 in spec.tail:
        raise SchemaError(f"field {name!r}: rows of shape {spec.tail} hold nothing")
    return spec, cells


def _encoded(data: object) -> tuple[Spec, Column]:
    plain = type(data).__module__.startswith("tensordict") or (isinstance(data, np.ndarray) and data.dtype.kind in "OU")
    if plain:
        return _listed(cast("Values", data).tolist())
    if isinstance(data, Sequence):
        return _listed(data)
    if getattr(data, "is_nested", False):
        return _jagged(cast("torch.Tensor", data))
    column = Column.infer(cast("Values", data))
    values = column.values
    if values.ndim == 1:
        return _spec(column, "number"), _cells(column, np.arange(len(values) + 1))
    return _spec(column, "rows", values.shape[2:]), _cells(column, np.arange(len(values) + 1) * values.shape[1])


def _spec(column: Column, kind: Literal["number", "rows"], tail: tuple[int, ...] = ()) -> Spec:
    return Spec(kind, dtype(column.dtype).logical, tail)


def _cells(column: Column, bounds: Int64s) -> Column:
    """Cut the bytes of flat values into cells; `bounds` count units, the last of which ends the values."""
    unit = column.values.nbytes // int(bounds[-1]) if bounds[-1] else 0
    return Column.ragged(column.bits, bounds * unit, "bytes")


def _jagged(tensor: "torch.Tensor") -> tuple[Spec, Column]:
    jagged: Any = tensor  # its methods are unknown to the type of a plain tensor
    if "jagged" not in str(tensor.layout) or jagged.lengths() is not None:
        return _listed(list(tensor.unbind()))
    column = Column.infer(tensor.values())
    bounds = jagged.offsets().cpu().numpy().astype(np.int64)
    return _spec(column, "rows", column.values.shape[1:]), _cells(column, bounds)


def _listed(data: Sequence[Any]) -> tuple[Spec, Column]:
    if all(isinstance(each, str) for each in data):
        return Spec("string"), Column.of("bytes", [each.encode() for each in data])
    if not all(hasattr(each, "dtype") and len(each.shape) for each in data):
        return Spec("value"), Column.of("bytes", [msgspec.msgpack.encode(each) for each in data])
    columns = [Column.infer(each) for each in data]
    specs = {_spec(column, "rows", column.values.shape[1:]) for column in columns}
    if len(specs) != 1:
        raise SchemaError(f"cells of different kinds: {', '.join(sorted(map(str, specs)))}")
    return specs.pop(), Column.of("bytes", [column.values.tobytes() for column in columns])


def decode(spec: Spec, cells: Column) -> Any:
    """Return a field as writable memory of its own: an array, or a list where cells differ or are no arrays."""
    if spec.kind == "string":
        return [cast("bytes", cell).decode() for cell in cells]
    if spec.kind == "value":
        return [msgspec.msgpack.decode(cast("bytes", cell)) for cell in cells]
    values, bounds = _rows(spec, cells)
    if spec.kind == "number":
        return values
    lengths = np.diff(bounds)
    if len(lengths) and (lengths == lengths[0]).all():
        return values.reshape(len(lengths), lengths[0], *spec.tail)
    return np.split(values, bounds[1:-1])


def _rows(spec: Spec, cells: Column) -> tuple[Values, Int64s]:
    assert cells.offsets is not None
    item = ITEMS[spec.item]
    unit = item.itemsize * int(np.prod(spec.tail, dtype=np.int64))
    values = cells.values.copy().view(item).reshape(-1, *spec.tail)
    return values, cells.offsets // max(unit, 1)


def present(specs: Mapping[str, Spec], cells: Mapping[str, Column], rows: int) -> Any:
    """Return fields as a TensorDict, laid out as `transferqueue` does, or as `Fields` where it is not installed."""
    if find_spec("tensordict") is None:
        return Fields({name: decode(spec, cells[name]) for name, spec in specs.items()}, rows)
    from tensordict import TensorDict

    return TensorDict({name: _tensor(spec, cells[name]) for name, spec in specs.items()}, batch_size=rows)


def _tensor(spec: Spec, cells: Column) -> Any:
    if spec.kind in ("string", "value"):
        from tensordict import NonTensorStack

        return NonTensorStack(*decode(spec, cells))
    import torch

    values, bounds = _rows(spec, cells)
    flat = torch.from_numpy(values)
    flat = flat.view(torch.bfloat16) if spec.item == "bfloat16" else flat
    if spec.kind == "number":
        return flat
    return torch.nested.nested_tensor_from_jagged(flat, torch.from_numpy(np.array(bounds)))
