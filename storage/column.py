"""One column of a batch: flat values, and int64 offsets where cells differ in length (Arrow's large layout).

Invariants: values are contiguous and read-only; offsets, where there are any, start at 0, never fall and
end at the number of values. Slices share memory with what they are cut from; only offsets are rewritten.
"""

import itertools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import numpy as np
import numpy.typing as npt

from asyncflow.errors import SchemaError
from asyncflow.storage.schema import ITEMS, DType, dense, dtype
from asyncflow.types import Int64s

if TYPE_CHECKING:
    import torch

Values: TypeAlias = npt.NDArray[Any]
Cell: TypeAlias = Values | np.generic | str | bytes
ColumnData: TypeAlias = "Column | Values | torch.Tensor | Sequence[Any]"

# Below this many bytes a run, one gather by index is faster than copying run by run.
_RUN_BYTES = 512
# Kinds of Python numbers that a kind of dtype takes, if the value fits.
_TAKES = {"b": "b", "i": "iu", "u": "iu", "f": "iuf"}


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
        if kind.kind in ("string", "bytes"):
            return _texts(kind, cast("Sequence[Any]", data))
        if kind.kind == "list":
            return _lists(kind, data)
        values = _array(data, kind)
        if values.ndim == 0 or values.shape[1:] != kind.shape:
            raise SchemaError(
                f"a column of {name} needs shape (n{''.join(f', {n}' for n in kind.shape)}), not {values.shape}"
            )
        return cls(kind, values)

    @classmethod
    def infer(cls, data: ColumnData) -> "Column":
        """Make a column whose dtype follows from the data."""
        if isinstance(data, Column):
            return data
        return cls.of(_inferred(data), data)

    @classmethod
    def ragged(cls, values: Values, offsets: Int64s, name: str) -> "Column":
        """Make a ragged column from its buffers: cell i is `values[offsets[i]:offsets[i + 1]]`."""
        kind = dtype(name)
        if not kind.ragged:
            raise SchemaError(f"{name} is not a ragged dtype")
        flat, bounds = _array(values, kind), np.asarray(offsets)
        if bounds.dtype != np.int64 or bounds.ndim != 1 or len(bounds) == 0 or flat.ndim != 1:
            raise SchemaError("a ragged column needs flat values and one-dimensional int64 offsets, at least one")
        if bounds[0] != 0 or bounds[-1] != len(flat) or np.any(bounds[1:] < bounds[:-1]):
            raise SchemaError(f"offsets must rise from 0 to the number of values, {len(flat)}")
        return cls(kind, flat, bounds)

    @property
    def dtype(self) -> str:
        """Logical dtype: `list<bfloat16>` though the values are uint16."""
        return self._type.name

    @property
    def lengths(self) -> Int64s:
        """Number of values of each cell, int64."""
        if self.offsets is None:
            return np.full(len(self), int(np.prod(self._type.shape)), np.int64)
        return np.diff(self.offsets)

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
        if self.offsets is None:
            return cast("Cell", self.values[index])
        return self._cell(int(self.offsets[index]), int(self.offsets[index + 1]))

    def __iter__(self) -> Iterator[Cell]:
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
    def buffers(self) -> list[memoryview]:
        """The raw bytes of values and offsets, without a copy."""
        arrays = [self.bits] if self.offsets is None else [self.bits, self.offsets.view(np.uint8)]
        return [array.data if array.size else memoryview(b"") for array in arrays]

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
        if int(offsets[-1]) * self.values.itemsize >= _RUN_BYTES * len(pick.first):
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
        """Return values (n, w) and a mask (n, w) that is 1 where there is a value; w is the longest by default."""
        if self._type.kind != "list":
            raise SchemaError(f"a column of {self.dtype} cannot be padded")
        lengths = self.lengths
        longest = int(lengths.max(initial=0))
        if width is not None and width < longest:
            raise SchemaError(f"width {width} is less than the longest cell, {longest}")
        wide = longest if width is None else width
        places = np.arange(wide)
        mask = places >= (wide - lengths)[:, None] if left else places < lengths[:, None]
        values = np.full(mask.shape, fill, self.values.dtype)
        values[mask] = self.values
        return values, mask.view(np.uint8)

    def to_torch(self) -> "torch.Tensor":
        """Return the values as a tensor, flat for a ragged column.

        It is a copy: torch knows no read-only tensors, and a write into shared memory would change cells.
        """
        import torch

        values = torch.from_numpy(self.values.copy())
        return values.view(torch.bfloat16) if self._type.logical == "bfloat16" else values


class Pick:
    """Indices of cells, looked at once for all columns that they are taken from."""

    __slots__ = ("first", "indices", "last", "range")

    def __init__(self, indices: Int64s) -> None:
        self.indices = indices
        self.range: tuple[int, int] | None = (0, 0)
        if len(indices) == 0:
            return
        breaks = np.flatnonzero(indices[1:] != indices[:-1] + 1)
        self.range = None if len(breaks) else (int(indices[0]), int(indices[-1]) + 1)
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


def _same(kind: DType, column: Column) -> Column:
    if column.dtype != kind.name:
        raise SchemaError(f"a column of {column.dtype} is not one of {kind.name}")
    return column


def _numpy(data: object) -> Values | None:
    """Return arrays and tensors as an array (bfloat16 as its bits), anything else as None."""
    if isinstance(data, np.ndarray):
        return data.view(np.uint16) if data.dtype not in _NAMES and data.dtype.name == "bfloat16" else data
    if not hasattr(data, "detach"):
        return None
    tensor = cast("torch.Tensor", data).detach().cpu()
    if str(tensor.dtype) == "torch.bfloat16":
        import torch

        tensor = tensor.contiguous().view(torch.uint16)
    array: Values = tensor.numpy()
    return array


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
_NAMES: dict[object, str] = {item: name for name, item in ITEMS.items() if name != "bfloat16"}


def _array(data: object, kind: DType) -> Values:
    """Return data as an array of the item dtype; arrays are never converted, Python numbers only if they fit."""
    array = _numpy(data)
    if array is None:
        return _numbers(cast("Sequence[Any]", data), kind)
    # The bits of a bfloat16 come as a bfloat16 array, or as plain uint16.
    if _logical(data) != kind.logical and not (kind.logical == "bfloat16" and array.dtype == np.uint16):
        raise SchemaError(f"values of {_logical(data)} do not fit a column of {kind.name}")
    return np.ascontiguousarray(array, dtype=kind.item)


def _numbers(data: Sequence[Any], kind: DType) -> Values:
    try:
        plain = np.asarray(data)
        exact = len(plain) == 0 or plain.dtype.kind in _TAKES[kind.item.kind]
        with np.errstate(over="raise"):
            values = np.array(data, dtype=kind.item) if exact and kind.logical != "bfloat16" else None
    except (FloatingPointError, ValueError, TypeError, OverflowError) as error:
        raise SchemaError(f"the values do not fit a column of {kind.name}: {error}") from error
    if values is None:
        raise SchemaError(f"values of {plain.dtype} do not fit a column of {kind.name}")
    return values if len(values) else values.reshape(0, *kind.shape)


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
    whole = _numpy(data)
    if whole is not None and whole.ndim == 2:
        offsets = np.arange(len(whole) + 1, dtype=np.int64) * whole.shape[1]
        return Column(kind, _array(data, kind).reshape(-1), offsets)
    if whole is not None:
        raise SchemaError(f"a column of {kind.name} needs an array of shape (n, length) or a list of arrays")
    cells = [_array(cell, kind) for cell in cast("Sequence[object]", data)]
    if any(cell.ndim != 1 for cell in cells):
        raise SchemaError(f"each cell of a column of {kind.name} has one dimension")
    lengths = np.fromiter(map(len, cells), np.int64, len(cells))
    return Column(kind, np.concatenate(cells) if cells else np.empty(0, kind.item), bounds_of(lengths))


def _inferred(data: object) -> str:
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
        return f"list<{np.asarray([value for cell in cells for value in cast('list[object]', cell)]).dtype.name}>"
    if _numpy(first) is not None and cast("Values", _numpy(first)).ndim:
        return f"list<{_logical(first)}>"
    return _logical(np.asarray(cells))
