"""Templates over an item's fields: `Question: {question}`, `{metadata[word]}`, `{choices[0]}`; `{{` is a brace.

A field is looked up by key or index only, never as an attribute. `{word!l}` is in lower case, `{word!u}` in upper.
"""

import json
import re
from collections.abc import Mapping, Sequence
from string import Formatter
from typing import Any

from asyncflow.config.names import hint
from asyncflow.errors import ConfigError, DataError

_CASES = {"l": str.lower, "u": str.upper}
_FIELD = re.compile(r"([^\[\]]+)((?:\[[^\[\]]+\])*)")


class Template:
    """A parsed template; ConfigError if it does not parse."""

    def __init__(self, template: str) -> None:
        self.text = template
        try:
            parts = list(Formatter().parse(template))
        except ValueError as error:
            raise ConfigError(f"template {template!r}: {error}; a literal brace is written {{{{ or }}}}") from None
        self._parts = [
            (literal, None if name is None else _steps(template, name), _CASES.get(case or ""))
            for literal, name, _, case in parts
        ]
        if any(spec or (case and case not in _CASES) for _, _, spec, case in parts):
            raise ConfigError(f"template {template!r}: formats are not supported, and of conversions only !l and !u")

    @property
    def fields(self) -> tuple[str, ...]:
        """Names of the fields that it reads."""
        return tuple(steps[0] for _, steps, _ in self._parts if steps)

    def value(self, item: Mapping[str, Any], where: str) -> Any:
        """Return the field itself if the template is nothing but one field, else the text."""
        if len(self._parts) == 1 and not self._parts[0][0] and self._parts[0][1] and not self._parts[0][2]:
            return _look_up(item, self._parts[0][1], where)
        return self.render(item, where)

    def render(self, item: Mapping[str, Any], where: str) -> str:
        """Fill in an item; DataError names the item, the field, and the fields there are."""
        return "".join(
            literal + ("" if steps is None else (case or str)(plain(_look_up(item, steps, where))))
            for literal, steps, case in self._parts
        )


def plain(value: Any) -> str:
    """Write a field's value as text: text as it is, lists and mappings as JSON."""
    if isinstance(value, str):
        return value
    return json.dumps(value, ensure_ascii=False, default=str) if isinstance(value, dict | list) else str(value)


def _steps(template: str, name: str) -> tuple[str, ...]:
    match = _FIELD.fullmatch(name)
    if match is None:
        raise ConfigError(f"template {template!r}: expected a field like {{name}} or {{name[key]}}, found {{{name}}}")
    return (match[1], *re.findall(r"\[([^\[\]]+)\]", match[2]))


def _look_up(item: Mapping[str, Any], steps: Sequence[str], where: str) -> Any:
    value: Any = item
    for depth, step in enumerate(steps):
        key, keys = _key(value, step)
        if key is None:
            path = steps[0] + "".join(f"[{done}]" for done in steps[1 : depth + 1])
            raise DataError(f"{where} has no field {path!r}{hint(step, keys, 'it has')}")
        value = value[key]
    if value is None:
        raise DataError(f"{where}: the field {steps[0]!r} is null")
    return value


def _key(value: Any, step: str) -> tuple[Any, list[str]]:
    if isinstance(value, Mapping):
        return (step if step in value else None), [str(key) for key in value]
    if isinstance(value, list | tuple):
        fits = step.isdecimal() and int(step) < len(value)
        return (int(step) if fits else None), [f"{len(value)} entries"] if len(value) else []
    return None, []
