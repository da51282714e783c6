"""YAML 1.2 with places: a tree of plain values, and for each key and value the line and column it stands at.

PyYAML speaks YAML 1.1, in which `1e-5` is text and `no` is false. The loader here knows the scalars of the YAML 1.2
core schema only, refuses a key that is given twice, and builds plain values without PyYAML's constructors.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import yaml

Route: TypeAlias = tuple[str | int, ...]
"""Where a value stands in the configuration: `("train", "lr")`, `("stages", 0, "fn")`."""

_NULL = "tag:yaml.org,2002:null"
_BOOL = "tag:yaml.org,2002:bool"
_INT = "tag:yaml.org,2002:int"
_FLOAT = "tag:yaml.org,2002:float"
_TEXT = "tag:yaml.org,2002:str"

_SCALARS = (
    (_NULL, r"~|null|Null|NULL|", "~nN\0"),
    (_BOOL, r"true|True|TRUE|false|False|FALSE", "tTfF"),
    (_INT, r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", "-+0123456789"),
    (
        _FLOAT,
        r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        "-+.0123456789",
    ),
)


class Place(NamedTuple):
    """Where something was written; sorts as a reader meets it."""

    layer: int
    line: int
    column: int
    label: str
    """The file, `override 'train.lr=1'`, or another name of the layer."""
    folder: Path | None = None
    """Folder of the file, which relative paths may start from."""

    def __str__(self) -> str:
        return f"{self.label}:{self.line}:{self.column}" if self.line else self.label


@dataclass(frozen=True, slots=True)
class Fault:
    """A mistake with its place."""

    place: Place
    message: str

    def __str__(self) -> str:
        return f"{self.place}: {self.message}"


@dataclass(slots=True)
class Document:
    """One source of values."""

    tree: Any = None
    keys: dict[Route, Place] = field(default_factory=dict)
    """Places of keys; the empty route is the document itself."""
    values: dict[Route, Place] = field(default_factory=dict)
    """Places of values."""
    faults: list[Fault] = field(default_factory=list)
    broken: bool = False
    """The text could not be read as YAML at all, so that the tree says nothing."""


class Yaml12Loader(yaml.SafeLoader):
    """SafeLoader with the scalars of YAML 1.2."""


Yaml12Loader.yaml_implicit_resolvers = {}
for _tag, _pattern, _first in _SCALARS:
    Yaml12Loader.add_implicit_resolver(
        _tag, re.compile(f"^(?:{_pattern})$"), ["" if letter == "\0" else letter for letter in _first]
    )


def parse(text: str, start: Place) -> Document:
    """Read one YAML document; `start` names its layer, and has line 0 where lines mean nothing (overrides)."""
    document = Document(keys={(): start}, values={(): start})
    try:
        node = yaml.compose(text, Loader=Yaml12Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        document.faults.append(Fault(_at(start, mark), f"not valid YAML: {error.problem or error.context}"))
        document.broken = True
        return document
    except RecursionError:
        document.faults.append(Fault(start, "not readable: nested too deeply"))
        document.broken = True
        return document
    except yaml.YAMLError as error:
        document.faults.append(Fault(start, f"not valid YAML: {' '.join(str(error).split())}"))
        document.broken = True
        return document
    if node is not None:
        document.tree = _Builder(document, start).value(node, (), ())
    return document


def _at(start: Place, mark: Any) -> Place:
    if not start.line or mark is None:
        return start
    return start._replace(line=mark.line + 1, column=mark.column + 1)


class _Builder:
    def __init__(self, document: Document, start: Place) -> None:
        self._document, self._start = document, start

    def value(self, node: yaml.Node, route: Route, above: tuple[yaml.Node, ...]) -> Any:
        place = _at(self._start, node.start_mark)
        self._document.values[route] = place
        if any(node is parent for parent in above):
            return self._fault(place, "this alias stands inside the value that it names")
        if isinstance(node, yaml.MappingNode):
            return dict(self._entries(node, route, (*above, node)))
        if isinstance(node, yaml.SequenceNode):
            return [self.value(child, (*route, i), (*above, node)) for i, child in enumerate(node.value)]
        return self._scalar(node, place)

    def _entries(self, node: yaml.MappingNode, route: Route, above: tuple[yaml.Node, ...]) -> Iterator[tuple[Any, Any]]:
        first: dict[Any, int] = {}
        for key_node, value_node in node.value:
            place = _at(self._start, key_node.start_mark)
            if not isinstance(key_node, yaml.ScalarNode):
                self._fault(place, "a key must be text")
                continue
            key = self._scalar(key_node, place)
            if key in first:
                where = f" (first in line {first[key]})" if place.line else ""
                self._fault(place, f"{dotted((*route, key))}: the key is given twice{where}")
                continue
            first[key] = place.line
            self._document.keys[*route, key] = place
            yield key, self.value(value_node, (*route, key), above)

    def _scalar(self, node: yaml.Node, place: Place) -> Any:
        text, tag = str(node.value), node.tag
        if tag == _TEXT:
            return text
        if tag == _NULL:
            return None
        if tag == _BOOL:
            return text.lower() == "true"
        try:
            if tag == _INT:
                return int(text, {"0o": 8, "0x": 16}.get(text[:2], 10))
            if tag == _FLOAT:
                return float(text.lower().replace(".inf", "inf").replace(".nan", "nan"))
        except ValueError:
            return self._fault(place, f"{text!r} does not fit its tag {tag.rsplit(':')[-1]}")
        return self._fault(place, f"the tag {tag} has no meaning here")

    def _fault(self, place: Place, message: str) -> None:
        self._document.faults.append(Fault(place, message))


def dotted(route: Route) -> str:
    """Write a route as users do: `stages[0].fn`."""
    text = ""
    for part in route:
        text += f"[{part}]" if isinstance(part, int) else f".{part}"
    return text.removeprefix(".")
