"""Built-in reward functions, in the signature that the user's own may have: `fn(response, answer=..., item=...)`."""

import functools
import json
from collections.abc import Callable, Mapping
from typing import Any


def exact_match(response: str, answer: str) -> float:
    """Return 1 if response and answer are the same text but for white space around them, else 0."""
    return float(response.strip() == answer.strip())


def char_match(response: str, answer: str) -> float:
    """Return 1 for the answer itself, else the share of the longer text's positions that agree, below 1."""
    response, answer = response.strip(), answer.strip()
    if response == answer:
        return 1.0
    same = sum(mine == theirs for mine, theirs in zip(response, answer, strict=False))
    return same / max(len(response), len(answer))


def reasoning_gym(task: str, options: Mapping[str, Any], size: int, seed: int) -> Callable[..., float]:
    """Return the scorer of a reasoning-gym task; the arguments are those that its items were made with.

    Two tasks (arc_agi, rearc) compare tuples, which JSON turns into lists. Whether a task survives JSON is seen here;
    if it does not, each item is made anew from its index, which costs what generating it costs.
    """
    from asyncflow.data.sources import task_dataset, text

    dataset = task_dataset(task, options, size, seed)
    made = functools.lru_cache(maxsize=1024)(dataset.__getitem__)
    first = made(0)
    faithful = _own_score(dataset, first, first) == _own_score(dataset, first, json.loads(text(first)))

    def score(response: str, item: Mapping[str, Any]) -> float:
        index = item["metadata"].get("source_index")
        return float(dataset.score_answer(response.strip(), item if faithful or index is None else made(index)))

    return score


def _own_score(dataset: Any, item: Mapping[str, Any], read: Mapping[str, Any]) -> float | None:
    try:
        return float(dataset.score_answer(item["answer"], read))
    except (LookupError, TypeError, ValueError, AttributeError):
        return None


BUILT_IN: Mapping[str, Callable[..., float]] = {"exact_match": exact_match, "char_match": char_match}
