"""Names of Arrow types, `arrow<list<item: string>>`: what pyarrow prints, read back.

A type that its print does not say in full is refused. Imported on use, since pyarrow costs 0.6 s.
"""

import re
from collections.abc import Callable, Iterator
from functools import cache

import pyarrow as pa

from asyncflow.errors import SchemaError

MAX_NAME = 16 << 10
MAX_DEPTH = 24

_WORD = re.compile(r"[a-z]\w*(?:\[[a-z]+\])?")
_FIELD = re.compile(r"([^:<>,\[\]()]+): ")
_ZONE = re.compile(r"timestamp\[([a-z]+), tz=([^\]]+)\]")
_BINARY = re.compile(r"fixed_size_binary\[(\d{1,9})\]")
_DECIMAL = re.compile(r"decimal(\d+)\((\d{1,3}), (-?\d{1,3})\)")
_SIZE = re.compile(r"\[(\d{1,9})\]")


def name(kind: "pa.DataType") -> str:
    """Return the dtype of a column of this Arrow type."""
    found = f"arrow<{kind}>"
    if parse(found) != kind:
        raise SchemaError(f"a column cannot hold the Arrow type {kind}: its name does not say all of it")
    return found


@cache
def parse(name: str) -> "pa.DataType":
    """Return the Arrow type of a dtype; fields of lists need no name, and `float32` is as good as `float`."""
    text = name.removeprefix("arrow<").removesuffix(">")
    if len(name) > MAX_NAME or len(text) + 7 != len(name):
        raise SchemaError(f"{name[:200]!r} is no Arrow type: expected arrow<T>, at most {MAX_NAME} characters")
    reader = _Reader(text)
    try:
        kind = reader.type(MAX_DEPTH)
    except (ValueError, TypeError, KeyError, OverflowError) as error:
        raise SchemaError(f"{name[:200]!r}: unknown Arrow type at {reader.rest!r}: {error}") from error
    if reader.rest:
        raise SchemaError(f"{name[:200]!r}: {reader.rest!r} follows the type")
    return kind


class _Reader:
    """Reads one type from the front of a text."""

    def __init__(self, text: str) -> None:
        self._text, self._at = text, 0

    @property
    def rest(self) -> str:
        return self._text[self._at :][:80]

    def type(self, depth: int) -> "pa.DataType":
        if depth == 0:
            raise ValueError(f"more than {MAX_DEPTH} levels")
        for pattern, make in _SPECIAL:
            if found := self._match(pattern):
                return make(*found.groups())
        word = self._match(_WORD)
        if word is None:
            raise ValueError("a type is missing")
        if not self._skip("<"):
            return pa.type_for_alias(word[0])
        return self._nested(word[0], depth - 1)

    def _nested(self, word: str, depth: int) -> "pa.DataType":
        if word == "map":
            kind = self._map(depth)
        elif word == "struct":
            kind = pa.struct(list(self._fields(depth)))
        else:
            kind = _LISTS[word](self._field(depth))
        self._want(">")
        if word != "fixed_size_list":
            return kind
        size = self._match(_SIZE)
        if size is None:
            raise ValueError("a fixed_size_list has a size, [3]")
        return pa.list_(kind.value_field, int(size[1]))

    def _map(self, depth: int) -> "pa.DataType":
        key = self.type(depth)
        self._want(", ")
        return pa.map_(key, self.type(depth), keys_sorted=self._skip(", keys_sorted"))

    def _fields(self, depth: int) -> "Iterator[pa.Field]":
        while self.rest[:1] not in (">", ""):
            yield self._field(depth)
            if not self._skip(", "):
                return

    def _field(self, depth: int) -> "pa.Field":
        label = self._match(_FIELD)
        kind = self.type(depth)
        return pa.field(label[1] if label else "item", kind, nullable=not self._skip(" not null"))

    def _match(self, pattern: "re.Pattern[str]") -> "re.Match[str] | None":
        found = pattern.match(self._text, self._at)
        if found:
            self._at = found.end()
        return found

    def _skip(self, mark: str) -> bool:
        there = self._text.startswith(mark, self._at)
        self._at += len(mark) if there else 0
        return there

    def _want(self, mark: str) -> None:
        if not self._skip(mark):
            raise ValueError(f"expected {mark!r}")


def _decimal(bits: str, precision: str, scale: str) -> "pa.DataType":
    return {"128": pa.decimal128, "256": pa.decimal256}[bits](int(precision), int(scale))


_SPECIAL: "list[tuple[re.Pattern[str], Callable[..., pa.DataType]]]" = [
    (_ZONE, pa.timestamp),
    (_BINARY, lambda size: pa.binary(int(size))),
    (_DECIMAL, _decimal),
]
_LISTS: "dict[str, Callable[[pa.Field], pa.DataType]]" = {
    "list": pa.list_,
    "large_list": pa.large_list,
    "fixed_size_list": pa.list_,
}
