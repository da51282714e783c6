"""One way to call a reward function, whatever its signature; the names of its parameters tell which it has.

    ours   fn(response, prompt=..., answer=..., item=..., <fields of the item by name>) -> number or None
    verl   fn(data_source, solution_str, ground_truth, extra_info=None) -> number, or a dict with `score`
    TRL    fn(completions, prompts=..., <columns by name>) -> list; it is called with lists of one

`reward.options` are keyword arguments of all three. A parameter that nothing provides is found before the first call.
"""

import inspect
import json
import math
from collections.abc import Callable, Collection, Coroutine, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from asyncflow.config.names import hint
from asyncflow.errors import ConfigError, RewardError


@dataclass(frozen=True, slots=True)
class Sample:
    """One response to be scored."""

    response: str
    prompt: str = ""
    answer: str = ""
    """The reference answer, from the template `data.answer`."""
    item: str = "{}"
    """JSON of the item that the prompt was made from."""
    source: str = ""


Scorer: TypeAlias = Callable[[Sample], float | None]
Provide: TypeAlias = Callable[[Sample, Mapping[str, Any]], dict[str, Any]]


def adapt(function: Callable[..., Any], options: Mapping[str, Any], fields: Collection[str] | None = None) -> Scorer:
    """Return the function as one of a sample; ConfigError names a parameter or an option that does not fit.

    `fields` are those of the items; where they are None, a missing field shows only when a sample lacks it.
    """
    parameters = _parameters(function)
    provide, offered = _style(function, parameters)
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    named = [p for p in parameters.values() if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
    _check(function, named, takes_all, offered, options, fields)
    is_trl = provide is _trl
    first = [p.name for p in named if p.kind is p.POSITIONAL_ONLY]
    later = [p.name for p in named if p.kind is not p.POSITIONAL_ONLY]
    needed = [p.name for p in named if p.default is p.empty]

    def score(sample: Sample) -> float | None:
        item = json.loads(sample.item)
        given = {**provide(sample, item), **options}
        for name in needed:
            if name not in given:
                raise RewardError(f"the item has no field {name!r}{hint(name, item, 'it has')}")
        positional = [given.pop(name) for name in first if name in given]
        names = given if takes_all else [name for name in later if name in given]
        result = function(*positional, **{name: given[name] for name in names})
        if inspect.iscoroutine(result):
            result = _awaited(result)
        return number(_single(result) if is_trl else result)

    return score


def number(result: Any) -> float | None:
    """Return a finite number, or None for an absent score; RewardError for anything else."""
    if isinstance(result, Mapping) and "score" in result:
        result = result["score"]
    if result is None:
        return None
    if isinstance(result, str | bytes) or not hasattr(result, "__float__"):
        raise RewardError(f"returned {result!r:.80}, which is a {type(result).__name__} and not a number")
    value = float(result)
    if not math.isfinite(value):
        raise RewardError(f"returned {value}, which is not a finite number; return None for no score")
    return value


def _parameters(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):
        raise ConfigError(f"{_name(function)} does not tell its parameters: wrap it in a Python function") from None


def _style(function: Callable[..., Any], parameters: Mapping[str, Any]) -> tuple[Provide, tuple[str, ...]]:
    for marker, (provide, offered) in _STYLES.items():
        if marker in parameters:
            return provide, offered
    raise ConfigError(
        f"{_name(function)} takes {', '.join(parameters) or 'nothing'}: a reward function has a parameter `response` "
        "(ours), `solution_str` (as in verl) or `completions` (as in TRL)"
    )


def _check(
    function: Callable[..., Any],
    named: Iterable[inspect.Parameter],
    takes_all: bool,
    offered: Collection[str],
    options: Mapping[str, Any],
    fields: Collection[str] | None,
) -> None:
    parameters = {p.name: p for p in named}
    provided = list(dict.fromkeys([*offered, *options, *(fields or ())]))
    problems = [
        f"{_name(function)} has no parameter {name!r} for reward.options.{name}{hint(name, parameters, 'it has')}"
        for name in options
        if name not in parameters and not takes_all
    ]
    problems += [f"reward.options.{name} would hide the {name} of the sample" for name in options if name in offered]
    if fields is not None:
        problems += [
            f"{_name(function)}: nothing provides its parameter {name!r}; there are {', '.join(provided)}"
            for name, p in parameters.items()
            if p.default is p.empty and name not in provided
        ]
    if problems:
        raise ConfigError(problems)


def _ours(sample: Sample, item: Mapping[str, Any]) -> dict[str, Any]:
    return {**item, "response": sample.response, "prompt": sample.prompt, "answer": sample.answer, "item": item}


def _verl(sample: Sample, item: Mapping[str, Any]) -> dict[str, Any]:
    return {
        **item,
        "data_source": item.get("data_source", sample.source),
        "solution_str": sample.response,
        "ground_truth": sample.answer,
        "extra_info": item.get("extra_info", item),
    }


def _trl(sample: Sample, item: Mapping[str, Any]) -> dict[str, Any]:
    chat = isinstance(item.get("prompt"), list)
    completion = [{"role": "assistant", "content": sample.response}] if chat else sample.response
    return {
        **{name: [value] for name, value in {"answer": sample.answer, **item}.items()},
        "completions": [completion],
        "prompts": [item["prompt"] if chat else sample.prompt],
    }


def _awaited(result: Coroutine[Any, Any, Any]) -> Any:
    import asyncio

    return asyncio.run(result)


def _single(result: Any) -> Any:
    if isinstance(result, str | Mapping) or not hasattr(result, "__len__") or len(result) != 1:
        raise RewardError(f"returned {result!r:.80}: a function of `completions` returns a list with a score for each")
    return result[0]


def _name(function: Callable[..., Any]) -> str:
    return getattr(function, "__qualname__", repr(function))


_STYLES: Mapping[str, tuple[Provide, tuple[str, ...]]] = {
    "response": (_ours, ("response", "prompt", "answer", "item")),
    "solution_str": (_verl, ("data_source", "solution_str", "ground_truth", "extra_info")),
    "completions": (_trl, ("completions", "prompts", "answer")),
}
