"""From YAML files and overrides to a checked `Pipeline`, or to every mistake at once.

Files are merged left to right, mapping by mapping, then overrides such as `train.lr=1e-4`. A null means "not given":
it takes back what an earlier file gave, and the default holds; inside `options` a null of a file is a value.

Paths in a file (`data.source`, `reward.fn`, `model.path`, ...) start from the current folder, or, where nothing stands
there, from the folder of the file; those of an override start from the current folder. What exists becomes absolute,
so that the loaded pipeline means the same in every process. `output.folder` always starts from the current folder.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from pydantic import ValidationError

from asyncflow.config import explain
from asyncflow.config.check import check
from asyncflow.config.document import Document, Fault, Place, Route, dotted, parse
from asyncflow.config.fields import Section
from asyncflow.config.importing import anchor, missing
from asyncflow.config.model import Pipeline
from asyncflow.config.problem import Problem
from asyncflow.config.sources import FILE_SCHEMES, scheme
from asyncflow.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Loaded:
    """A checked pipeline, and where its values were written."""

    pipeline: Pipeline
    files: tuple[Path, ...]
    """The files that it was read from, as given."""
    document: Document
    """The merged values as written, with the place of each."""

    def line(self, problem: Problem) -> str:
        """Write a problem with its place: `file:line:column: path: message`."""
        return str(_placed(problem, self.document))


def load(
    paths: Sequence[str | Path] | str | Path,
    overrides: Sequence[str] = (),
    base: Mapping[str, Any] | Pipeline | None = None,
) -> Loaded:
    """Read, merge, validate and check; ConfigError carries every mistake, in the order in which a reader meets them.

    `base` lies below the files: values from Python, or another pipeline (what was set in it, not its defaults).
    """
    files = tuple(Path(path) for path in ([paths] if isinstance(paths, str | Path) else paths))
    merged = Document(tree={})
    if base is not None:
        _join(merged, _from_python(base))
    for number, file in enumerate(files, 1):
        _join(merged, _read(file, number))
    for number, text in enumerate(overrides, len(files) + 1):
        _override(merged, text, Place(number, 0, 0, f"override {text!r}"))
    if merged.broken:
        raise _error(merged.faults)
    _anchor(merged)
    tree = _without_nulls(merged.tree, ())
    pipeline, problems = _validate(tree)
    faults = merged.faults + [_placed(problem, merged) for problem in problems]
    if pipeline is None or faults:
        raise _error(faults)
    return Loaded(pipeline, files, merged)


def _error(faults: Iterable[Fault]) -> ConfigError:
    ordered = sorted(faults, key=lambda fault: fault.place[:3])
    return ConfigError(tuple(dict.fromkeys(map(str, ordered))))


def _placed(problem: Problem, document: Document) -> Fault:
    places = document.keys if problem.at == "key" else document.values
    for depth in range(len(problem.route), 0, -1):
        place = places.get(problem.route[:depth]) or document.keys.get(problem.route[:depth])
        if place is not None:
            return Fault(place, f"{dotted(problem.route)}: {problem.message}")
    root = document.keys.get((), Place(0, 0, 0, "configuration"))
    return Fault(root, f"{dotted(problem.route)}: {problem.message}")


# Reading


def _read(file: Path, number: int) -> Document:
    start = Place(number, 1, 1, str(file), file.absolute().parent)
    try:
        text = file.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        return _broken(start._replace(line=0), missing(file))
    except OSError as error:
        return _broken(start._replace(line=0), f"cannot be read: {error.strerror}")
    except UnicodeDecodeError as error:
        return _broken(start._replace(line=0), f"is not UTF-8: {error.reason} at byte {error.start}")
    document = parse(text, start)
    if not isinstance(document.tree, dict | None):
        return _broken(start, f"expected a mapping with keys of {', '.join(explain.fields(()))}")
    return document


def _broken(place: Place, message: str) -> Document:
    return Document(keys={(): place}, faults=[Fault(place, message)], broken=True)


def _from_python(base: Mapping[str, Any] | Pipeline) -> Document:
    tree = base.model_dump(exclude_unset=True) if isinstance(base, Pipeline) else _copy(base)
    place = Place(0, 0, 0, "base")
    document = Document(tree=tree, keys={(): place})

    def visit(value: object, route: Route) -> None:
        document.values[route] = document.keys[route] = place
        for key, child in value.items() if isinstance(value, dict) else ():
            visit(child, (*route, key))

    visit(tree, ())
    return document


def _copy(value: Any) -> Any:
    if isinstance(value, Section):
        return value.model_dump(exclude_unset=True)
    return {key: _copy(child) for key, child in value.items()} if isinstance(value, Mapping) else value


# Merging


def _join(merged: Document, layer: Document) -> None:
    tree = layer.tree or {}
    if isinstance(tree.get("output"), str):  # the short form, so that later layers can add to it
        tree["output"] = {"folder": tree["output"]}
        layer.keys["output", "folder"] = layer.values["output", "folder"] = layer.values["output",]
    merged.tree = _merge(merged.tree, tree)
    merged.keys |= layer.keys
    merged.values |= layer.values
    merged.faults += layer.faults
    merged.broken |= layer.broken


def _merge(old: Any, new: Any) -> Any:
    if isinstance(old, dict) and isinstance(new, dict):
        return {**old, **{key: _merge(old.get(key), value) for key, value in new.items()}}
    return new


def _override(merged: Document, text: str, place: Place) -> None:
    path, equals, value = text.partition("=")
    names = path.strip().split(".")
    if not equals or not all(names):
        merged.faults.append(Fault(place, "expected `section.key=value`"))
        return
    if not value.strip():
        merged.faults.append(Fault(place, f'no value: `{path}=null` unsets, `{path}=""` is an empty text'))
        return
    parsed = parse(value, place)
    merged.faults += parsed.faults
    if parsed.broken:
        merged.broken = True
        return
    if names == ["output"] and isinstance(parsed.tree, str):
        names = ["output", "folder"]
    route = _indexed(merged.tree, names)
    if parsed.tree is None and (unknown := explain.fault(route)):
        merged.faults.append(Fault(place, unknown))
        return
    problem = _put(merged, route, parsed.tree)
    if problem:
        merged.faults.append(Fault(place, f"{path}: {problem}"))
        return
    for depth in range(1, len(route)):
        merged.keys.setdefault(route[:depth], place)
        merged.values.setdefault(route[:depth], place)
    for below in parsed.values:
        merged.keys[route + below] = merged.values[route + below] = place


def _indexed(tree: Any, names: Sequence[str]) -> Route:
    """Read the numbers in an override's path as indices where a list stands."""
    route: list[str | int] = []
    for name in names:
        part: str | int = int(name) if isinstance(tree, list) and name.isdecimal() else name
        route.append(part)
        if isinstance(tree, list):
            tree = tree[part] if isinstance(part, int) and part < len(tree) else None
        else:
            tree = tree.get(name) if isinstance(tree, dict) else None
    return tuple(route)


def _put(merged: Document, route: Route, value: Any) -> str | None:
    """Set one value in place, or remove it if it is None; say what prevents it."""
    here: Any = merged.tree
    for part in route[:-1]:
        if isinstance(here, list):
            if not isinstance(part, int) or part >= len(here):
                return f"{part} is not an index of a list of {len(here)}"
            here = here[part]
            continue
        if not isinstance(here.get(part), dict | list):
            here[part] = {}
        here = here[part]
    last = route[-1]
    if isinstance(here, list):
        if not isinstance(last, int) or last >= len(here):
            return f"{last} is not an index of a list of {len(here)}"
        here[last] = _merge(here[last], value)
    elif value is None:
        here.pop(last, None)
    else:
        here[last] = _merge(here.get(last), value)
    return None


def _without_nulls(tree: Any, route: Route) -> Any:
    if isinstance(tree, list):
        return [_without_nulls(value, (*route, i)) for i, value in enumerate(tree)]
    if not isinstance(tree, dict) or not explain.fields(route):
        return tree
    return {key: _without_nulls(value, (*route, key)) for key, value in tree.items() if value is not None}


# Paths


def _anchor(merged: Document) -> None:
    for route in (("model", "path"), ("model", "tokenizer"), ("teacher", "path"), ("critic", "path")):
        _rewrite(merged, route, _anchored_path)
    for route in (("data", "source"), ("eval", "source")):
        _rewrite(merged, route, _anchored_source)
    for route in (("reward", "fn"), ("eval", "answer"), ("train", "advantage"), ("train", "loss")):
        _rewrite(merged, route, anchor)
    stages = merged.tree.get("stages")
    for number in range(len(stages) if isinstance(stages, list) else 0):
        _rewrite(merged, ("stages", number, "fn"), anchor)


Change: TypeAlias = Callable[[str, tuple[Path, ...]], str]


def _rewrite(merged: Document, route: Route, change: Change) -> None:
    *above, last = route
    here: Any = merged.tree
    for part in above:
        if isinstance(here, dict):
            here = here.get(part)
        elif isinstance(here, list) and isinstance(part, int):
            here = here[part]
    if isinstance(here, dict) and isinstance(here.get(last), str):
        place = merged.values.get(route)
        folders = (Path(), place.folder) if place is not None and place.folder else (Path(),)
        here[last] = change(here[last], folders)


def _anchored_path(path: str, folders: tuple[Path, ...]) -> str:
    return next((str((folder / path).absolute()) for folder in folders if path and (folder / path).exists()), path)


def _anchored_source(source: str, folders: tuple[Path, ...]) -> str:
    kind, rest = scheme(source)
    return f"{kind}:{_anchored_path(rest, folders)}" if kind in FILE_SCHEMES and rest else source


# Validating


def _validate(tree: Any) -> tuple[Pipeline | None, list[Problem]]:
    """Validate and check; where parts are wrong, the checks run over the rest."""
    problems: list[Problem] = []
    for _ in range(4):
        try:
            pipeline = Pipeline.model_validate(tree)
        except ValidationError as error:
            found = explain.problems(error)
            new = [problem for problem in found if not _overlaps(problem.route, problems)]
            problems += new
            tree = _mended(tree, error)
            continue
        return pipeline, problems + [
            problem
            for problem in check(pipeline)
            if not any(_overlaps(route, problems) for route in (problem.route, *problem.uses))
        ]
    return None, problems


def _overlaps(route: Route, problems: Iterable[Problem]) -> bool:
    return any(route[: len(p.route)] == p.route or p.route[: len(route)] == route for p in problems)


def _mended(tree: Any, error: ValidationError) -> Any:
    """Return the tree without what is wrong, and with stand-ins for what is missing."""
    for detail in reversed(error.errors(include_url=False, include_context=False)):
        route = tuple(part for part in detail["loc"] if part != "[key]")
        tree = _replaced(tree, route, explain.stand_in(route) if detail["type"] == "missing" else None)
    return tree


def _replaced(tree: Any, route: Route, value: Any) -> Any:
    if not route:
        return {} if value is None else value
    head, rest = route[0], route[1:]
    if isinstance(tree, list) and isinstance(head, int):
        kept = _replaced(tree[head], rest, value) if rest else value
        return [*tree[:head], *([] if kept is None else [kept]), *tree[head + 1 :]]
    if not isinstance(tree, dict):
        return tree
    if not rest and value is None:
        return {key: child for key, child in tree.items() if key != head}
    return {**tree, head: _replaced(tree.get(head, {}), rest, value) if rest else value}
