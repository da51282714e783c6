"""What a loss reports, added over micro-batches and ranks, and the metrics of a step made from it; free of torch.

A report is a plain mapping, so that it crosses processes. Names that end in `_max` hold a maximum, all others a
sum, and `combine` keeps to that; means are made only at the end, from the sums of the whole step.
"""

from collections.abc import Iterable, Mapping

_MEANS = {
    "ratio": "ratio_mean",
    "clipped": "clip_share",
    "gap": "logprob_gap_mean",
    "kl": "kl",
    "entropy": "entropy",
    "nll": "nll",
}


def combine(reports: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Add reports up: sums by sum, `*_max` by maximum."""
    total: dict[str, float] = {}
    for report in reports:
        for name, value in report.items():
            if name not in total:
                total[name] = value
            elif name.endswith("_max"):
                total[name] = max(total[name], value)
            else:
                total[name] += value
    return total


def divided(report: Mapping[str, float], share: float) -> dict[str, float]:
    """Multiply the losses of a report, which are its only values that depend on the step's denominator."""
    return {name: value * share if _is_loss(name) else value for name, value in report.items()}


def metrics(report: Mapping[str, float]) -> dict[str, float]:
    """Turn the combined report of a step into its metrics.

    `loss` and its parts as they are; for each trained token `ratio_mean`, `clip_share`, `logprob_gap_mean`, `kl`,
    `entropy`, `nll`; `ratio_max`, `logprob_gap_max`; `trained_tokens`. Absent in, absent out.
    """
    tokens = max(1.0, report.get("tokens", 0.0))
    means = {name: report[key] / tokens for key, name in _MEANS.items() if key in report}
    maxima = {"ratio_max": "ratio_max", "gap_max": "logprob_gap_max", "tokens": "trained_tokens"}
    plain = {name: report[key] for key, name in maxima.items() if key in report}
    losses = {name: value for name, value in report.items() if _is_loss(name)}
    return {**losses, **means, **plain}


def _is_loss(name: str) -> bool:
    return name.split("_")[-1] == "loss"
