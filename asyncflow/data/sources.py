"""Items of a source, as plain dicts: `jsonl:FILE`, `parquet:FILE`, `reasoning_gym:TASK`, `python`.

Everything is read at once: prompts are small beside one model. An item keeps all of its fields, for templates and
rewards; `text` is how an item crosses to another process.
"""

import itertools
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

from asyncflow.config.importing import missing
from asyncflow.config.model import Data
from asyncflow.config.names import hint
from asyncflow.config.sources import SCHEMES, scheme
from asyncflow.errors import DataError, MissingDependency

Item: TypeAlias = dict[str, Any]


def items(data: Data, python: Iterable[Mapping[str, Any]] | None = None, seed: int = 0) -> list[Item]:
    """Read or generate the first `data.size` items, all if it is None; DataError if there are none or too few.

    `python` is what `source: python` stands for: a Hugging Face dataset, a list of dicts, or any iterable of mappings.
    """
    kind, rest = scheme(data.source)
    if kind == "python":
        found = _python(python)
    elif kind == "jsonl":
        found = _jsonl(_file(rest))
    elif kind == "parquet":
        found = _parquet(_file(rest))
    elif kind == "reasoning_gym":
        found = _reasoning_gym(rest, data, seed)
    else:
        raise DataError(f"unknown kind of source {kind!r}{hint(kind, SCHEMES)}")
    taken = list(itertools.islice(found, data.size))
    if not taken:
        raise DataError(f"{data.source}: no items")
    if data.size is not None and len(taken) < data.size:
        raise DataError(f"{data.source}: data.size is {data.size}, but there are only {len(taken)} items")
    return taken


def text(item: Mapping[str, Any]) -> str:
    """Write an item as JSON; what JSON has no form for becomes a list, a number or text."""
    return json.dumps(item, ensure_ascii=False, default=_plain)


def _plain(value: Any) -> Any:
    if isinstance(value, set | frozenset):
        return sorted(value, key=str)
    return value.tolist() if hasattr(value, "tolist") else str(value)


def _file(rest: str) -> Path:
    if not Path(rest).is_file():
        raise DataError(missing(Path(rest)))
    return Path(rest)


def _jsonl(file: Path) -> Iterator[Item]:
    with file.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            raw = line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
            if not raw.strip():
                continue
            try:
                item = json.loads(raw.decode())
            except UnicodeDecodeError as error:
                raise DataError(f"{file}:{number}: not UTF-8: {error.reason} at byte {error.start + 1}") from None
            except json.JSONDecodeError as error:
                raise DataError(f"{file}:{number}:{error.colno}: not valid JSON: {error.msg}") from None
            except (ValueError, RecursionError) as error:
                raise DataError(f"{file}:{number}: not readable as JSON: {error}") from None
            if not isinstance(item, dict):
                raise DataError(f"{file}:{number}: expected a JSON object, found {type(item).__name__}")
            yield item


def _parquet(file: Path) -> Iterator[Item]:
    import pyarrow
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(file) as reader:
            for batch in reader.iter_batches(1024):
                yield from batch.to_pylist()
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{file}: not readable as Parquet: {error}") from error


def _reasoning_gym(task: str, data: Data, seed: int) -> Iterator[Item]:
    dataset = task_dataset(task, data.options, data.size or 0, seed)
    if not data.size:
        raise DataError(f"{data.source} makes items without end: give data.size")
    for index in range(data.size):
        try:
            yield dict(dataset[index])
        except (TypeError, ValueError, IndexError, AssertionError) as error:
            raise DataError(f"data.options do not fit the reasoning_gym task {task}: {error}") from error


def task_dataset(task: str, options: Mapping[str, Any], size: int, seed: int) -> Any:
    """Make the reasoning-gym dataset of a task, whose items and scores follow from these arguments alone."""
    try:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        install = "pip install 'asyncflow-rl[tasks]'"
        raise MissingDependency("reasoning-gym", "a reasoning_gym source", install) from error
    if task not in DATASETS:
        raise DataError(f"reasoning_gym has no task {task!r}{hint(task, sorted(DATASETS), 'it has')}")
    try:
        return reasoning_gym.create_dataset(task, **{"size": max(size, 1), "seed": seed, **options})
    except (TypeError, ValueError, AssertionError) as error:
        raise DataError(f"data.options do not fit the reasoning_gym task {task}: {error}") from error


def _python(python: Iterable[Mapping[str, Any]] | None) -> Iterator[Item]:
    if python is None:
        raise DataError("data.source is `python`, but no dataset was handed over")
    if isinstance(python, Mapping):
        names = ", ".join(map(str, python))
        raise DataError(f"expected a list of items, found a mapping of {names}: hand over one of them")
    for number, item in enumerate(python):
        if not isinstance(item, Mapping):
            raise DataError(f"item {number} is a {type(item).__name__}: expected a mapping of fields")
        yield dict(item)
