"""Names of dtypes and the columns of a table.

A dtype is a fixed one (`float32`), a dense cell of a fixed shape (`float32[2,3]`), a ragged sequence
(`list<int64>`), `string` or `bytes`. Dtypes are compared by name: nothing is ever promoted or narrowed.
Every table has the identity columns of `IDENTITY` beside its own.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Literal

import numpy as np

from asyncflow.errors import SchemaError

Kind = Literal["fixed", "list", "string", "bytes"]

_INTEGERS = [f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)]
# numpy has no bfloat16: its bits are kept as uint16, and only the name tells them apart.
ITEMS: dict[str, np.dtype[np.generic]] = {
    name: np.dtype(name) for name in ("bool", *_INTEGERS, "float16", "float32", "float64")
} | {"bfloat16": np.dtype("uint16")}

IDENTITY: dict[str, str] = {
    "source": "string",
    "prompt_id": "int64",
    "group_id": "int64",
    "rollout_id": "int64",
    "segment": "int64",
}

MAX_COLUMNS = 64
"""Columns of a table with its identity columns: presence is one bit of a uint64 for each."""

_NAME = re.compile(r"(?:list<(?P<list>\w+)>|(?P<item>\w+)(?:\[(?P<shape>\d+(?:,\d+)*)\])?)")


@dataclass(frozen=True, slots=True)
class DType:
    """A parsed dtype: what one value is stored as, and how the values of a cell lie."""

    name: str
    kind: Kind
    item: np.dtype[np.generic]
    logical: str
    """Name of the dtype of one value: `bfloat16` for `list<bfloat16>`."""
    shape: tuple[int, ...] = ()
    """Shape of one cell of a fixed dtype."""

    @property
    def ragged(self) -> bool:
        """Whether cells differ in length, so that the column has offsets."""
        return self.kind != "fixed"


@cache
def dtype(name: str) -> DType:
    """Parse the name of a dtype; an unknown one is a SchemaError that lists those there are."""
    if name == "string":
        return DType(name, "string", np.dtype("uint8"), "uint8")
    if name == "bytes":
        return DType(name, "bytes", np.dtype("uint8"), "uint8")
    match = _NAME.fullmatch(name)
    logical = (match["list"] or match["item"]) if match else ""
    if match is None or logical not in ITEMS:
        raise SchemaError(f"unknown dtype {name!r}; known: {', '.join(ITEMS)}, string, bytes, list<T>, T[n,m]")
    if match["list"]:
        return DType(name, "list", ITEMS[logical], logical)
    shape = tuple(int(size) for size in match["shape"].split(",")) if match["shape"] else ()
    return DType(_dense(logical, shape), "fixed", ITEMS[logical], logical, shape)


def _dense(logical: str, shape: tuple[int, ...]) -> str:
    return f"{logical}[{','.join(map(str, shape))}]" if shape else logical


def dense(logical: str, shape: tuple[int, ...]) -> DType:
    """Return the dtype of cells of this shape."""
    return dtype(_dense(logical, shape))


class Schema:
    """The columns of a table, name to dtype; identity columns are part of every table and need not be named."""

    __slots__ = ("_bits", "columns")

    def __init__(self, columns: Mapping[str, str]) -> None:
        self.columns: dict[str, str] = IDENTITY | {
            name: dtype(kind).name for name, kind in columns.items() if self._named(name, kind)
        }
        if len(self.columns) > MAX_COLUMNS:
            raise SchemaError(f"{len(self.columns)} columns with the identity columns, at most {MAX_COLUMNS}")
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
        bits = np.uint64(0)
        for name in names:
            self.dtype(name)
            bits |= self._bits[name]
        return bits

    def names(self, mask: np.uint64) -> list[str]:
        """Return the columns whose presence bits are set."""
        return [name for name, bit in self._bits.items() if mask & bit]

    def check(self, columns: Mapping[str, str]) -> None:
        """Refuse columns that the table does not have, or has with another dtype."""
        for name, kind in columns.items():
            if self.dtype(name).name != kind:
                raise SchemaError(f"column {name!r} is {self.columns[name]}, the batch has {kind}")
