"""What a loss reports, added over micro-batches and ranks, and the metrics of a step made from it; free of torch.

A report is a plain mapping, so that it crosses processes. Names that end in `_max` hold a maximum, all others a
sum, or counts by bin (`spread`), and `combine` keeps to that; means are made only at the end, from the sums of the
whole step.
"""

from collections.abc import Iterable, Mapping
from typing import TypeAlias

from asyncflow.algorithms.spread import merge, quantiles

Report: TypeAlias = Mapping[str, float | list[int]]

_MEANS = {
    "ratio": "ratio_mean",
    "clipped": "clip_share",
    "gap": "logprob_gap_mean",
    "kl": "kl",
    "entropy": "entropy",
    "nll": "nll",
    "weight": "off_policy_weight_mean",
    "bounded": "off_policy_bounded_share",
    "rejected": "off_policy_rejected_share",
    "value_clipped": "value_clip_share",
}
_AS_THEY_ARE = {
    "ratio_max": "ratio_max",
    "gap_max": "logprob_gap_max",
    "weight_max": "off_policy_weight_max",
    "tokens": "trained_tokens",
}
_QUANTILES = {"logprob_gap_p50": 0.5, "logprob_gap_p90": 0.9, "logprob_gap_p99": 0.99}


def combine(reports: Iterable[Report]) -> dict[str, float | list[int]]:
    """Add reports up: sums by sum, counts bin by bin, `*_max` by maximum."""
    total: dict[str, float | list[int]] = {}
    for report in reports:
        for name, value in report.items():
            total[name] = _both(name, total[name], value) if name in total else value
    return total


def _both(name: str, one: float | list[int], other: float | list[int]) -> float | list[int]:
    if isinstance(one, list) and isinstance(other, list):
        return merge(one, other)
    if isinstance(one, list) or isinstance(other, list):
        raise TypeError(f"{name} is reported once as counts and once as a number")
    return max(one, other) if name.endswith("_max") else one + other


def divided(report: Report, share: float) -> dict[str, float | list[int]]:
    """Multiply the losses of a report, which are its only values that depend on the step's denominator."""
    return {
        name: value * share if _is_loss(name) and not isinstance(value, list) else value
        for name, value in report.items()
    }


def metrics(report: Report) -> dict[str, float]:
    """Turn the combined report of a step into its metrics.

    `loss` and its parts as they are; for each trained token `ratio_mean`, `clip_share`, `logprob_gap_mean`, `kl`,
    `entropy`, `nll`, `off_policy_weight_mean`, `off_policy_bounded_share`, `off_policy_rejected_share`,
    `value_clip_share`; `ratio_max`, `logprob_gap_max`, `off_policy_weight_max`; quantiles `logprob_gap_p50`, `…_p90`,
    `…_p99`; `trained_tokens`.
    Absent in, absent out.
    """
    numbers = {name: value for name, value in report.items() if not isinstance(value, list)}
    tokens = max(1.0, numbers.get("tokens", 0.0))
    means = {name: numbers[key] / tokens for key, name in _MEANS.items() if key in numbers}
    plain = {name: numbers[key] for key, name in _AS_THEY_ARE.items() if key in numbers}
    losses = {name: value for name, value in numbers.items() if _is_loss(name)}
    counts = report.get("spread")
    spread = (
        dict(zip(_QUANTILES, quantiles(counts, list(_QUANTILES.values())), strict=True))
        if isinstance(counts, list)
        else {}
    )
    return {**losses, **means, **plain, **spread}


def _is_loss(name: str) -> bool:
    return name.split("_")[-1] == "loss"
