"""Names of dtypes and the columns of a table.

A dtype is a fixed one (`float32`), a dense cell of a fixed shape (`float32[2,3]`), a ragged sequence
(`list<int64>`), a ragged sequence of dense items (`list<float32[2]>`), `string`, `bytes`, or any Arrow type
(`arrow<list<item: string>>`). Dtypes are compared by name: nothing is ever promoted or narrowed.
Every table has the identity columns of `IDENTITY` beside its own.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, reduce
from operator import or_
from typing import Literal

import numpy as np

from asyncflow.errors import SchemaError

Kind = Literal["fixed", "list", "string", "bytes", "arrow"]

_INTEGERS = [f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)]
_FLOATS = ("float16", "float32", "float64", "complex64", "complex128")
_FLOAT8 = ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu")

RAW: dict[str, np.dtype[np.generic]] = {"bfloat16": np.dtype("uint16"), **dict.fromkeys(_FLOAT8, np.dtype("uint8"))}
"""Dtypes that numpy has not: their bits are kept as integers, and only the name tells them apart."""

ITEMS: dict[str, np.dtype[np.generic]] = {name: np.dtype(name) for name in ("bool", *_INTEGERS, *_FLOATS)} | RAW
"""What one value is stored as, by the name of its dtype."""

IDENTITY: dict[str, str] = {
    "source": "string",
    "prompt_id": "int64",
    "group_id": "int64",
    "rollout_id": "int64",
    "segment": "int64",
}

MAX_COLUMNS = 64
"""Columns of a table with its identity columns: presence is one bit of a uint64 for each."""

MAX_AXES = 24
MAX_VALUES = 1 << 40
"""Of one cell or item; an axis of no length counts as one."""

_NAME = re.compile(r"(?P<list>list<)?(?P<item>\w+)(?:\[(?P<shape>\d{1,18}(?:,\d{1,18})*)\])?(?(list)>)")


@dataclass(frozen=True, slots=True)
class DType:
    """A parsed dtype: what one value is stored as, and how the values of a cell lie."""

    name: str
    kind: Kind
    item: np.dtype[np.generic]
    logical: str
    """Name of the dtype of one value: `bfloat16` for `list<bfloat16>`."""
    shape: tuple[int, ...] = ()
    """Shape of one cell of a fixed dtype, of one item of a ragged one."""

    @property
    def ragged(self) -> bool:
        """Whether cells differ in length, so that the column has offsets."""
        return self.kind != "fixed"

    @property
    def nbytes(self) -> int:
        """Bytes of one cell of a fixed dtype, of one item of a ragged one."""
        return self.item.itemsize * math.prod(self.shape)


@cache
def dtype(name: str) -> DType:
    """Parse the name of a dtype; an unknown one is a SchemaError that lists those there are."""
    if name == "string":
        return DType(name, "string", np.dtype("uint8"), "uint8")
    if name == "bytes":
        return DType(name, "bytes", np.dtype("uint8"), "uint8")
    if name.startswith("arrow<"):
        from asyncflow.storage import arrowtype  # brings pyarrow

        return DType(arrowtype.name(arrowtype.parse(name)), "arrow", np.dtype("uint8"), "uint8")
    match = _NAME.fullmatch(name)
    if match is None or match["item"] not in ITEMS:
        raise SchemaError(
            f"unknown dtype {name!r}; known: {', '.join(ITEMS)}, string, bytes, list<T>, T[n,m], list<T[n]>, arrow<T>"
        )
    shape = tuple(int(size) for size in match["shape"].split(",")) if match["shape"] else ()
    if len(shape) > MAX_AXES or math.prod(max(size, 1) for size in shape) > MAX_VALUES:
        raise SchemaError(f"{name!r}: at most {MAX_AXES} axes and {MAX_VALUES} values, for numpy to make one of it")
    if not match["list"]:
        return dense(match["item"], shape)
    if 0 in shape:
        raise SchemaError(f"{name!r}: an item of a ragged column has at least one value")
    return ragged(match["item"], shape)


@cache
def dense(logical: str, shape: tuple[int, ...] = ()) -> DType:
    """Return the dtype of cells of this shape."""
    return DType(_shaped(logical, shape), "fixed", ITEMS[logical], logical, shape)


@cache
def ragged(logical: str, shape: tuple[int, ...] = ()) -> DType:
    """Return the dtype of sequences of items of this shape."""
    return DType(f"list<{_shaped(logical, shape)}>", "list", ITEMS[logical], logical, shape)


def _shaped(logical: str, shape: tuple[int, ...]) -> str:
    return f"{logical}[{','.join(map(str, shape))}]" if shape else logical


_MASKS = 256
"""Kept masks of a schema: tasks and puts name the same columns again and again."""


class Schema:
    """The columns of a table, name to dtype; identity columns are part of every table and need not be named."""

    __slots__ = ("_bits", "_masks", "columns")

    def __init__(self, columns: Mapping[str, str]) -> None:
        self.columns: dict[str, str] = IDENTITY | {
            name: dtype(kind).name for name, kind in columns.items() if self._named(name, kind)
        }
        if len(self.columns) > MAX_COLUMNS:
            raise SchemaError(f"{len(self.columns)} columns with the identity columns, at most {MAX_COLUMNS}")
        self._masks: dict[tuple[str, ...], np.uint64] = {}
        self._bits = {name: np.uint64(1 << bit) for bit, name in enumerate(self.columns)}

    @staticmethod
    def _named(name: str, kind: str) -> bool:
        if not isinstance(name, str) or not name:
            raise SchemaError(f"a column needs a name, not {name!r}")
        if name in IDENTITY and kind != IDENTITY[name]:
            raise SchemaError(f"identity column {name!r} is {IDENTITY[name]}, not {kind}")
        return True

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Schema) and self.columns == other.columns

    def __hash__(self) -> int:
        return hash(tuple(sorted(self.columns.items())))

    def __repr__(self) -> str:
        return f"Schema({ {name: kind for name, kind in self.columns.items() if name not in IDENTITY} })"

    def with_columns(self, columns: Mapping[str, str]) -> "Schema":
        """Return the schema with more columns after those there are; one it has must be of the same dtype."""
        for name, kind in columns.items():
            if name in self.columns and dtype(kind).name != self.columns[name]:
                raise SchemaError(f"column {name!r} is {self.columns[name]}, not {kind}")
        return Schema(self.columns | dict(columns))

    def dtype(self, column: str) -> DType:
        """Return the dtype of a column; an unknown one is a SchemaError."""
        if column not in self.columns:
            raise SchemaError(f"no column {column!r}; columns: {', '.join(self.columns)}")
        return dtype(self.columns[column])

    def mask(self, names: "list[str] | tuple[str, ...]") -> np.uint64:
        """Return the presence bits of some columns."""
        key = tuple(names)
        if key not in self._masks:
            for name in names:
                self.dtype(name)
            if len(self._masks) >= _MASKS:
                self._masks.clear()
            self._masks[key] = reduce(or_, (self._bits[name] for name in names), np.uint64(0))
        return self._masks[key]

    def names(self, mask: np.uint64) -> list[str]:
        """Return the columns whose presence bits are set."""
        return [name for name, bit in self._bits.items() if mask & bit]

    def check(self, columns: Mapping[str, str]) -> None:
        """Refuse columns that the table does not have, or has with another dtype."""
        for name, kind in columns.items():
            if self.dtype(name).name != kind:
                raise SchemaError(f"column {name!r} is {self.columns[name]}, the batch has {kind}")
