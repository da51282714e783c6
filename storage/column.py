"""One column of a batch: flat values, and int64 offsets where cells differ in length (Arrow's large layout).

Invariants: values are contiguous and read-only, and their first axis counts cells, or items where there are
offsets; those start at 0, never fall and end at the number of items. Slices share memory with what they are
cut from; only offsets are rewritten.
"""

import itertools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, TypeGuard, cast

import numpy as np
import numpy.typing as npt

from asyncflow.errors import SchemaError
from asyncflow.storage import tensors
from asyncflow.storage.schema import ITEMS, RAW, DType, dense, dtype, ragged
from asyncflow.types import Int64s

if TYPE_CHECKING:
    import pyarrow as pa
    import torch

Values: TypeAlias = npt.NDArray[Any]
Cell: TypeAlias = Any
"""An array, a numpy scalar, a string or bytes; of an `arrow<T>` column what pyarrow makes of it in Python."""
ColumnData: TypeAlias = "Column | Values | torch.Tensor | pa.Array | Sequence[Any]"

# Below this many bytes a run, one gather by index is faster than copying run by run.
_RUN_BYTES = 512
# Kinds of Python numbers that a kind of dtype takes, if the value fits.
_TAKES = {"b": "b", "i": "iu", "u": "iu", "f": "iuf", "c": "iufc"}


class Column:
    """The cells of one column; build it with `Column.of`, `Column.infer` or `Column.ragged`."""

    __slots__ = ("_type", "offsets", "values")

    def __init__(self, kind: DType, values: Values, offsets: Int64s | None = None) -> None:
        self._type = kind
        self.values = _frozen(values)
        self.offsets = None if offsets is None else cast("Int64s", _frozen(offsets))

    @classmethod
    def of(cls, name: str, data: ColumnData) -> "Column":
        """Make a column of a given dtype; arrays must have it already, Python numbers take it if they fit."""
        kind = dtype(name)
        if isinstance(data, Column):
            return _same(kind, data)
        if kind.kind == "arrow" or _is_arrow(data):
            return _same(kind, _arrow(kind, data))
        if kind.kind in ("string", "bytes"):
            return _texts(kind, cast("Sequence[Any]", data))
        if kind.kind == "list":
            return _lists(kind, data)
        values = _array(data, kind)
        if values.ndim == 0 or values.shape[1:] != kind.shape:
            raise SchemaError(f"a column of {name} needs values of shape {_shape(kind)}, not {values.shape}")
        return cls(kind, values)

    @classmethod
    def infer(cls, data: ColumnData) -> "Column":
        """Make a column whose dtype follows from the data."""
        if isinstance(data, Column):
            return data
        if _is_arrow(data):
            return _arrow(None, data)
        return cls.of(_inferred(data), data)

    @classmethod
    def ragged(cls, values: Values, offsets: Int64s, name: str) -> "Column":
        """Make a ragged column from its buffers: cell i is `values[offsets[i]:offsets[i + 1]]`."""
        kind = dtype(name)
        if not kind.ragged:
            raise SchemaError(f"{name} is not a ragged dtype")
        flat, bounds = _array(values, kind), np.asarray(offsets)
        if bounds.dtype != np.int64 or bounds.ndim != 1 or len(bounds) == 0:
            raise SchemaError("a ragged column needs one-dimensional int64 offsets, at least one")
        if flat.ndim == 0 or flat.shape[1:] != kind.shape:
            raise SchemaError(f"a column of {name} needs values of shape {_shape(kind)}, not {flat.shape}")
        if bounds[0] != 0 or bounds[-1] != len(flat) or np.any(bounds[1:] < bounds[:-1]):
            raise SchemaError(f"offsets must rise from 0 to the number of values, {len(flat)}")
        return cls(kind, flat, bounds)

    @property
    def dtype(self) -> str:
        """Logical dtype: `list<bfloat16>` though the values are uint16."""
        return self._type.name

    @property
    def lengths(self) -> Int64s:
        """Number of values of each cell, of items where it is ragged, int64."""
        if self.offsets is None:
            return np.full(len(self), int(np.prod(self._type.shape)), np.int64)
        return np.diff(self.offsets)

    @property
    def item_bytes(self) -> int:
        """Bytes of what `lengths` counts."""
        return self.values.itemsize if self.offsets is None else self._type.nbytes

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers."""
        return self.values.nbytes + (0 if self.offsets is None else self.offsets.nbytes)

    @property
    def array(self) -> Values:
        """The dense values, shape (n, …), of a fixed column."""
        if self.offsets is not None:
            raise SchemaError(f"a column of {self.dtype} is ragged: use values and offsets, or to_padded")
        return self.values

    def __len__(self) -> int:
        return len(self.values) if self.offsets is None else len(self.offsets) - 1

    def __getitem__(self, index: int) -> Cell:
        if not -len(self) <= index < len(self):
            raise IndexError(f"cell {index} of {len(self)}")
        index %= max(len(self), 1)
        if self._type.kind == "arrow":
            return self.slice(index, index + 1).to_arrow()[0].as_py()
        if self.offsets is None:
            return self.values[index]
        return self._cell(int(self.offsets[index]), int(self.offsets[index + 1]))

    def __iter__(self) -> Iterator[Cell]:
        if self._type.kind == "arrow":
            return iter(self.to_arrow().to_pylist())
        if self.offsets is None:
            return iter(self.values)
        bounds = self.offsets.tolist()
        return (self._cell(start, stop) for start, stop in itertools.pairwise(bounds))

    def __repr__(self) -> str:
        return f"Column({self.dtype}, {len(self)} cells, {self.nbytes} bytes)"

    def _cell(self, start: int, stop: int) -> Cell:
        cell = self.values[start:stop]
        if self._type.kind == "list":
            return cell
        return cell.tobytes() if self._type.kind == "bytes" else cell.tobytes().decode()

    def strings(self) -> list[str]:
        """Return the cells of a string column as Python strings."""
        if self._type.kind != "string" or self.offsets is None:
            raise SchemaError(f"a column of {self.dtype} has no strings")
        raw, bounds = self.values.tobytes(), self.offsets.tolist()
        return [raw[start:stop].decode() for start, stop in itertools.pairwise(bounds)]

    def equals(self, other: "Column") -> bool:
        """Whether dtype, lengths and every bit are the same (so NaN equals itself, and 0.0 is not -0.0)."""
        return (
            self.dtype == other.dtype
            and len(self) == len(other)
            and (self.offsets is None or np.array_equal(self.offsets, cast("Int64s", other.offsets)))
            and np.array_equal(self.bits, other.bits)
        )

    @property
    def bits(self) -> npt.NDArray[np.uint8]:
        """The values as raw bytes, without a copy."""
        return self.values.reshape(-1).view(np.uint8)

    @property
    def raw(self) -> list[npt.NDArray[np.uint8]]:
        """The raw bytes of values and offsets, without a copy."""
        return [self.bits] if self.offsets is None else [self.bits, self.offsets.view(np.uint8)]

    @property
    def buffers(self) -> list[memoryview]:
        """The same as memory views."""
        return [array.data if array.size else memoryview(b"") for array in self.raw]

    def slice(self, start: int, stop: int) -> "Column":
        """Return cells start to stop; the values are shared."""
        if self.offsets is None:
            return Column(self._type, self.values[start:stop])
        bounds = self.offsets[start : stop + 1]
        return Column(self._type, self.values[bounds[0] : bounds[-1]], bounds - bounds[0])

    def take(self, pick: "Pick | Int64s") -> "Column":
        """Return cells in the order of `pick`; a contiguous ascending range is a slice without a copy."""
        pick = pick if isinstance(pick, Pick) else Pick(pick)
        if pick.range is not None:
            return self.slice(*pick.range)
        indices = pick.indices
        if self.offsets is None:
            return Column(self._type, self.values[indices])
        starts, lengths = self.offsets[indices], self.offsets[indices + 1] - self.offsets[indices]
        offsets = bounds_of(lengths)
        if int(offsets[-1]) * self._type.nbytes >= _RUN_BYTES * len(pick.first):
            begin, end = starts[pick.first].tolist(), (starts + lengths)[pick.last].tolist()
            pieces = [self.values[b:e] for b, e in zip(begin, end, strict=True)]
            return Column(self._type, np.concatenate(pieces), offsets)
        flat = np.repeat(starts - offsets[:-1], lengths) + np.arange(offsets[-1])
        return Column(self._type, self.values[flat], offsets)

    def copy(self) -> "Column":
        """Return a column with memory of its own."""
        return Column(self._type, self.values.copy(), None if self.offsets is None else self.offsets.copy())

    @staticmethod
    def concat(columns: "Sequence[Column]") -> "Column":
        """Join columns of one dtype, one after another."""
        kinds = {column.dtype for column in columns}
        if len(kinds) != 1:
            raise SchemaError(f"only columns of one dtype can be joined, not {sorted(kinds)}")
        if len(columns) == 1:
            return columns[0]
        values = np.concatenate([column.values for column in columns])
        if columns[0].offsets is None:
            return Column(columns[0]._type, values)
        return Column(columns[0]._type, values, bounds_of(np.concatenate([column.lengths for column in columns])))

    def to_padded(
        self, fill: float = 0, left: bool = False, width: int | None = None
    ) -> tuple[Values, npt.NDArray[np.uint8]]:
        """Return values (n, w, …) and a mask (n, w) that is 1 where there is an item; w is the longest by default.

        Cells stand to the left and `fill` follows them; with `left` the other way round. `fill` must be a
        value of the column's dtype. Values of bfloat16 and float8 come as their bits.
        """
        if self._type.kind != "list":
            raise SchemaError(f"a column of {self.dtype} cannot be padded")
        lengths = self.lengths
        longest = int(lengths.max(initial=0))
        if width is not None and width < longest:
            raise SchemaError(f"width {width} is less than the longest cell, {longest}")
        wide = longest if width is None else width
        places = np.arange(wide)
        mask = places >= (wide - lengths)[:, None] if left else places < lengths[:, None]
        values = np.full((*mask.shape, *self._type.shape), _fill(fill, self._type), self.values.dtype)
        values[mask] = self.values
        return values, mask.view(np.uint8)

    def to_arrow(self) -> "pa.Array":
        """Return a pyarrow array, on the same buffers but for `arrow<T>`, whose cells are turned into one."""
        from asyncflow.storage.arrow import array

        return array(self)

    def to_torch(self, copy: bool = False) -> "torch.Tensor":
        """Return the values as a tensor: (n, …) for a fixed column, the items of all cells for a ragged one.

        It is on the memory of the column, though torch has no read-only tensors: whoever writes into it changes
        cells that others read, or ends the process. Ask for a `copy` to work in place.
        """
        return tensors.tensor(self.values.copy() if copy else self.values, self._type.logical)

    def to_nested(self, copy: bool = False) -> "torch.Tensor":
        """Return a ragged column as a jagged nested tensor, on the memory of the column like `to_torch`."""
        if self._type.kind != "list" or self.offsets is None:
            raise SchemaError(f"a column of {self.dtype} makes no nested tensor: it has no sequences of numbers")
        offsets = self.offsets.copy() if copy else self.offsets
        return tensors.nested(self.to_torch(copy), tensors.tensor(offsets, "int64"))


class Pick:
    """Indices of cells, looked at once for all columns that they are taken from."""

    __slots__ = ("first", "indices", "last", "range")

    def __init__(self, indices: Int64s) -> None:
        self.indices = indices
        self.range: tuple[int, int] | None = (0, 0)
        if len(indices) == 0:
            return
        breaks = np.flatnonzero(indices[1:] != indices[:-1] + 1)
        if len(breaks) == 0:
            self.range = int(indices[0]), int(indices[-1]) + 1
            return
        self.range = None
        # Where each run of consecutive indices begins and ends.
        self.first, self.last = np.append(0, breaks + 1), np.append(breaks, len(indices) - 1)


def bounds_of(lengths: Int64s) -> Int64s:
    """Return the offsets of cells of these lengths."""
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


def _frozen(array: Values) -> Values:
    flags = array.flags
    if flags.c_contiguous and not flags.writeable:
        return array
    view = array.view() if flags.c_contiguous else np.ascontiguousarray(array)
    view.flags.writeable = False
    return view


def _is_arrow(data: object) -> bool:
    return type(data).__module__.partition(".")[0] == "pyarrow"


def _arrow(kind: DType | None, data: object) -> Column:
    from asyncflow.storage.arrow import column, nested_column

    return column(data) if kind is None or kind.kind != "arrow" else nested_column(kind, data)


def _same(kind: DType, column: Column) -> Column:
    if column.dtype != kind.name:
        raise SchemaError(f"a column of {column.dtype} is not one of {kind.name}")
    return column


def _shape(kind: DType) -> str:
    return f"(n{''.join(f', {size}' for size in kind.shape)})"


def _numpy(data: object) -> Values | None:
    """Return arrays and tensors as an array (dtypes that numpy has not as their bits), anything else as None."""
    if isinstance(data, np.ndarray):
        if data.dtype in _NAMES:
            return data
        raw = RAW.get(data.dtype.name)
        return data if raw is None else data.view(raw)
    return tensors.array(data) if tensors.is_tensor(data) else None


def _logical(data: object) -> str:
    """Return the name of the dtype of the values of an array or tensor."""
    kind = getattr(data, "dtype", None)
    if kind in _NAMES:
        return _NAMES[kind]
    name = getattr(kind, "name", str(kind).removeprefix("torch."))
    if name not in ITEMS:
        raise SchemaError(f"no column can hold values of {name}; known: {', '.join(ITEMS)}")
    return str(name)


# The name of a numpy dtype is composed anew each time that it is asked for.
_NAMES: dict[object, str] = {item: name for name, item in ITEMS.items() if name not in RAW}


def _array(data: object, kind: DType) -> Values:
    """Return data as an array of the item dtype; arrays are never converted, Python numbers only if they fit."""
    array = _numpy(data)
    if array is None:
        return _stacked(data, kind) if _typed(data) else _numbers(cast("Sequence[Any]", data), kind)
    # The bits of a bfloat16 come as a bfloat16 array, or as plain uint16.
    if _logical(data) not in (kind.logical, _NAMES[kind.item]):
        raise SchemaError(f"values of {_logical(data)} do not fit a column of {kind.name}")
    return np.asarray(array, dtype=kind.item, order="C")


def _typed(data: object) -> "TypeGuard[Sequence[object]]":
    """Whether this is a list of arrays or tensors."""
    return isinstance(data, list | tuple) and len(data) > 0 and _numpy(data[0]) is not None


def _stacked(cells: Sequence[object], kind: DType) -> Values:
    try:
        return np.stack([_array(cell, kind) for cell in cells])
    except ValueError as error:
        raise SchemaError(f"the cells of a column of {kind.name} have one shape: {error}") from error


def _numbers(data: Sequence[Any], kind: DType) -> Values:
    try:
        plain = _plain(data)
        exact = len(plain) == 0 or plain.dtype.kind in _TAKES[kind.item.kind]
        with np.errstate(over="raise"):
            values = np.array(data, dtype=kind.item) if exact and kind.logical not in RAW else None
    except (FloatingPointError, ValueError, TypeError, OverflowError) as error:
        raise SchemaError(f"the values do not fit a column of {kind.name}: {error}") from error
    if values is None:
        raise SchemaError(f"values of {plain.dtype} do not fit a column of {kind.name}")
    return values if len(values) else values.reshape(0, *kind.shape)


def _plain(data: Sequence[Any]) -> Values:
    """Return numbers as an array; numpy takes integers beyond int64 for floats where smaller ones stand beside them."""
    plain = np.asarray(data)
    if plain.dtype != np.float64 or not np.any(np.abs(plain) >= 2**63):
        return plain
    each = np.asarray(data, object)
    return each.astype(np.uint64) if all(isinstance(one, int | np.integer) for one in each.flat) else plain


def _fill(value: float, kind: DType) -> Values:
    """Return a number as one value of a column, by its bits where numpy has not the dtype."""
    if kind.logical in RAW:
        return tensors.bits(value, kind.logical)
    known = bool(value) if kind.logical == "bool" and value in (0, 1) else value
    return _numbers([known], dense(kind.logical))


def _texts(kind: DType, data: Sequence[Any]) -> Column:
    cells: list[Any] = data.tolist() if isinstance(data, np.ndarray) else list(data)
    wanted = str if kind.kind == "string" else bytes
    if not all(isinstance(cell, wanted) for cell in cells):
        raise SchemaError(f"a column of {kind.name} takes only {wanted.__name__} cells")
    raw = cells if wanted is bytes else _encoded(cells)
    lengths = np.fromiter(map(len, raw), np.int64, len(raw))
    return Column(kind, np.frombuffer(b"".join(raw), np.uint8), bounds_of(lengths))


def _encoded(cells: list[str]) -> list[bytes]:
    try:
        return [cell.encode() for cell in cells]
    except UnicodeEncodeError as error:
        raise SchemaError(f"a string that UTF-8 cannot hold: {error}") from error


def _lists(kind: DType, data: object) -> Column:
    if tensors.is_tensor(data) and data.is_nested:
        data = data.unbind()
    if tensors.are_tensors(data):
        values, sizes = tensors.joined(data)
        return Column.ragged(_array(values, kind), bounds_of(sizes), kind.name)
    whole = _numpy(data)
    if whole is not None and whole.ndim == 2 + len(kind.shape):
        offsets = np.arange(len(whole) + 1, dtype=np.int64) * whole.shape[1]
        return Column.ragged(_array(data, kind).reshape(-1, *whole.shape[2:]), offsets, kind.name)
    if whole is not None:
        raise SchemaError(f"a column of {kind.name} needs a list of arrays, or one array that is a batch of them")
    cells = [_array(cell, kind) for cell in cast("Sequence[object]", data)]
    if any(cell.ndim == 0 or cell.shape[1:] != kind.shape for cell in cells):
        raise SchemaError(f"each cell of a column of {kind.name} has shape {_shape(kind)}")
    lengths = np.fromiter(map(len, cells), np.int64, len(cells))
    return Column(kind, np.concatenate(cells) if cells else np.empty((0, *kind.shape), kind.item), bounds_of(lengths))


def _inferred(data: object) -> str:
    if tensors.is_tensor(data) and data.is_nested:
        pieces = data.unbind()
        return ragged(_logical(data), tuple(pieces[0].shape[1:]) if pieces else ()).name
    array = _numpy(data)
    if array is not None:
        return "string" if array.dtype.kind == "U" else dense(_logical(data), array.shape[1:]).name
    cells = cast("Sequence[object]", data)
    if len(cells) == 0:
        raise SchemaError("the dtype of an empty list cannot be inferred: use Column.of")
    first = cells[0]
    if isinstance(first, str | bytes):
        return "string" if isinstance(first, str) else "bytes"
    if isinstance(first, list | tuple):
        return _of_lists(cast("Sequence[Sequence[object]]", cells))
    array = _numpy(first)
    if array is None:
        return _logical(_plain(cells))
    return ragged(_logical(first), array.shape[1:]).name if array.ndim else _logical(first)


def _of_lists(cells: Sequence[Sequence[object]]) -> str:
    try:
        flat = np.asarray(list(itertools.chain.from_iterable(cells)))
    except ValueError as error:
        raise SchemaError(f"lists of lists have items of one shape: {error}") from error
    return ragged(_logical(flat), flat.shape[1:]).name
