"""From what pydantic found to what a user can act on: the place, what was expected, what stands there instead."""

import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from asyncflow.config.document import Route, dotted
from asyncflow.config.fields import Section
from asyncflow.config.model import Pipeline
from asyncflow.config.names import foreign, nearest
from asyncflow.config.problem import Problem


def problems(error: ValidationError) -> list[Problem]:
    """Turn all errors of one validation into problems."""
    found: list[Problem] = []
    meant: set[str] = set()
    for detail in error.errors(include_url=False):
        route = tuple(part for part in detail["loc"] if part != "[key]")
        if detail["type"] == "extra_forbidden":
            message, targets = unknown(route)
            meant.update(targets)
            found.append(Problem(route, message, at="key"))
        elif detail["type"] == "missing":
            found.append(Problem(route, f"is missing: {_description(route)}", at="key"))
        else:
            found.append(Problem(route, _wrong(detail, route)))
    # A slip in a required key is one mistake: not also the absence of the key that was meant.
    return [p for p in found if not (p.message.startswith("is missing") and _covered(p.route, meant))]


def _covered(route: Route, meant: set[str]) -> bool:
    name = dotted(route)
    return any(target == name or target.startswith(f"{name}.") for target in meant)


def unknown(route: Route) -> tuple[str, tuple[str, ...]]:
    """Explain a key that its section does not have, and name what may have been meant."""
    key, section = str(route[-1]), fields(route[:-1])
    elsewhere = _elsewhere(key)
    if same := foreign(key):
        return f"unknown key: it is called {_either(same, ' and ')} here", same
    if elsewhere:
        return f"unknown key here: did you mean {_either(elsewhere, ' or ')}?", elsewhere
    if near := nearest(key, section):
        return f"unknown key - did you mean {near!r}?", (dotted((*route[:-1], near)),)
    if near := nearest(key, [path.rpartition(".")[2] for path in _paths()]):
        paths = _elsewhere(near)
        return f"unknown key - did you mean {_either(paths, ' or ')}?", paths
    return f"unknown key; allowed: {', '.join(section)}", ()


def fault(route: Route) -> str | None:
    """Explain the first part of a route that the model does not know; None if it knows all."""
    for depth in range(len(route)):
        known = fields(route[:depth])
        if known and route[depth] not in known and not isinstance(route[depth], int):
            return f"{dotted(route[: depth + 1])}: {unknown(route[: depth + 1])[0]}"
    return None


def fields(route: Route) -> list[str]:
    """Names of the keys at a route; empty where it is not a section."""
    section = _annotation(route)
    return list(section.model_fields) if isinstance(section, type) and issubclass(section, Section) else []


def stand_in(route: Route) -> Any:
    """Return a value of the right type for a required key that is missing, so that the rest can be checked."""
    annotation = _annotation(route)
    if annotation is str:
        return ""
    return {} if isinstance(annotation, type) and issubclass(annotation, Section) else 1


def _annotation(route: Route) -> Any:
    annotation: Any = Pipeline
    for part in route:
        if isinstance(part, int):
            annotation = next(iter(typing.get_args(annotation)), None)
        elif isinstance(annotation, type) and issubclass(annotation, Section) and part in annotation.model_fields:
            annotation = _plain(annotation.model_fields[part].annotation)
        else:
            return None
    return annotation


def _plain(annotation: Any) -> Any:
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return next(arm for arm in typing.get_args(annotation) if arm is not type(None))
    return annotation


def _paths() -> list[str]:
    return [f"{section}.{key}" for section in Pipeline.model_fields for key in fields((section,))]


def _elsewhere(key: str) -> tuple[str, ...]:
    top = (key,) if key in Pipeline.model_fields else ()
    return top + tuple(path for path in _paths() if path.rpartition(".")[2] == key)


def _either(paths: Sequence[str], joint: str) -> str:
    return joint.join(f"`{path}`" for path in paths)


def _description(route: Route) -> str:
    section, key = _annotation(route[:-1]), route[-1]
    text = section.model_fields[key].description or "" if key in fields(route[:-1]) else "one value more"
    return text[:1].lower() + text[1:].rstrip(".")


def _wrong(detail: Mapping[str, Any], route: Route) -> str:
    kind, value, context = detail["type"], detail["input"], detail.get("ctx", {})
    if kind == "value_error":
        return f"{context['error']}, found {show(value)}"
    if kind == "literal_error":
        allowed = [text.strip("'") for text in context["expected"].replace(" or ", ", ").split(", ")]
        near = nearest(value, allowed) if isinstance(value, str) else None
        tail = f" - did you mean {near!r}?" if near else ""
        return f"expected {' or '.join(allowed)}, found {show(value)}{tail}"
    expected = _EXPECTED.get(kind)
    if expected is None:
        return f"{detail['msg'][:1].lower()}{detail['msg'][1:]}, found {show(value)}"
    keys = fields(route)
    what = f"a mapping with keys of {', '.join(keys)}" if kind.startswith("model_") and keys else expected(context)
    quote = " - text with braces, brackets or a colon needs quotes" if kind == "string_type" and _flow(value) else ""
    return f"expected {what}, found {show(value)}{quote}"


_EXPECTED: Mapping[str, Callable[[Mapping[str, Any]], str]] = {
    **{f"int_{tail}": lambda _: "a whole number" for tail in ("type", "parsing", "from_float", "parsing_size")},
    **{f"float_{tail}": lambda _: "a number" for tail in ("type", "parsing")},
    **{f"bool_{tail}": lambda _: "true or false" for tail in ("type", "parsing")},
    **{f"{kind}_type": lambda _: "a mapping" for kind in ("dict", "model", "model_attributes")},
    **{f"{kind}_type": lambda _: "a list" for kind in ("list", "tuple")},
    "string_type": lambda _: "text",
    "finite_number": lambda _: "a finite number",
    "greater_than_equal": lambda context: f"at least {context['ge']:g}",
    "greater_than": lambda context: f"more than {context['gt']:g}",
    "less_than_equal": lambda context: f"at most {context['le']:g}",
    "less_than": lambda context: f"less than {context['lt']:g}",
    "too_long": lambda context: f"at most {context['max_length']} values",
    "too_short": lambda context: f"at least {context['min_length']} values",
    "invalid_key": lambda _: "text as key",
}


def show(value: object) -> str:
    """Describe a value of a configuration in a message."""
    if value is None:
        return "nothing"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return f"the text {value!r}" if len(value) <= 60 else f"the text {value[:57]!r}..."
    if isinstance(value, int | float):
        return f"{value}"
    if isinstance(value, dict):
        return "a mapping"
    return "a list" if isinstance(value, list | tuple) else f"a {type(value).__name__}"


def _flow(value: object) -> bool:
    return isinstance(value, dict | list)
