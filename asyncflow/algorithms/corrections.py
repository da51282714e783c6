"""Weights on the token loss, for tokens that another policy, another version or another engine sampled.

`old` is the policy at the step's start as the trainer computes it, `behaviour` what the rollout engine reported
(μ); tensors (B, R). Everything is detached. A rejected token has weight 0 and stays in the loss's denominator.
Log-ratios are held within `MAX_LOG_RATIO`, those of whole sequences too.
"""

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from asyncflow.algorithms.kl import KL
from asyncflow.algorithms.masked import masked
from asyncflow.algorithms.ratio import held, log_ratio, over_row

Level = Literal["token", "sequence"]
Metric = Literal["ratio", "k1", "k2", "k3"]
Reduce = Literal["token", "sum", "mean", "max"]


class Weights(NamedTuple):
    """All of shape (B, R), without gradient."""

    weight: Tensor
    """What the token loss is multiplied by; 0 under the mask."""
    kept: Tensor
    """bool: trained and not rejected."""
    ratio: Tensor
    """old / μ before any bound, of the sequence where the weight is; 1 under the mask."""


def tis(old: Tensor, behaviour: Tensor, mask: Tensor, low: float, high: float, level: Level = "token") -> Weights:
    """Truncated importance sampling: clamp(old / μ, low, high).

    At level `sequence`, old / μ is the product over the row's trained tokens, not their geometric mean. Espeholt et
    al. 2018, arXiv:1802.01561; for two engines Yao et al. 2025, "Your efficient RL framework secretly brings you
    off-policy RL training".
    """
    _check_range(low, high)
    logs = log_ratio(old.detach(), behaviour, mask)
    if level == "sequence":
        logs = masked(over_row(logs, mask, "sum"), mask)
    elif level != "token":
        raise ValueError(f"level {level!r}: token or sequence")
    ratio = held(logs).exp()
    return _weights(ratio.clamp(low, high), mask != 0, ratio)


def icepop(old: Tensor, behaviour: Tensor, mask: Tensor, low: float, high: float) -> Weights:
    """old / μ inside [low, high], else 0 (Ling Team 2025, arXiv:2510.18855)."""
    _check_range(low, high)
    ratio = held(log_ratio(old.detach(), behaviour, mask)).exp()
    return _weights(ratio, (mask != 0) & _inside(ratio, low, high), ratio)


def decoupled(old: Tensor, behaviour: Tensor, mask: Tensor, cap: float) -> Weights:
    """min(old / μ, cap), for the clip around `old` (Hilton et al. 2021, arXiv:2110.00641; Fu et al. 2025,
    arXiv:2505.24298).
    """
    if not cap > 0:
        raise ValueError(f"cap {cap} must be greater than 0")
    ratio = held(log_ratio(old.detach(), behaviour, mask)).exp()
    return _weights(ratio.clamp(max=cap), mask != 0, ratio)


def reject(
    old: Tensor, behaviour: Tensor, mask: Tensor, metric: Metric, reduce: Reduce, low: float, high: float
) -> Weights:
    """1 where the metric of the token, or of the whole row, lies in [low, high], else 0.

    `ratio` is old / μ; its sum and mean over a row are taken of its logarithm, which makes them the product and the
    geometric mean. `k1`, `k2` and `k3` estimate KL(μ | old), with d = log μ - log old. Liu et al. 2025, "When speed
    kills stability".
    """
    _check_range(low, high)
    logs = held(log_ratio(old.detach(), behaviour, mask))
    kept = (mask != 0) & _inside(_metric(logs, mask, metric, reduce), low, high)
    return _weights(torch.ones_like(logs), kept, logs.exp())


def a3po_proximal(logprobs: Tensor, behaviour: Tensor, mask: Tensor, ages: Tensor) -> Tensor:
    """Approximate `old` without computing it: (1 - α) log μ + α sg(logπ), 0 under the mask.

    `ages` (B, R) is how many versions before the step's start, d, a token was sampled: α = d / (d + 1), since the
    policy in training is one version ahead of that start. A fresh token has its μ. Wu et al. 2025, arXiv:2512.06547.
    """
    age = masked(ages.detach(), mask).clamp(min=0)
    drift = held(log_ratio(logprobs.detach(), behaviour, mask))
    return masked(behaviour.detach(), mask) + age / (age + 1) * drift


def _metric(logs: Tensor, mask: Tensor, metric: Metric, reduce: Reduce) -> Tensor:
    """Return the metric of tokens (B, R), or of rows (B, 1)."""
    if metric != "ratio" and metric not in KL:
        raise ValueError(f"metric {metric!r}: ratio, {', '.join(KL)}")
    values = logs if metric == "ratio" else KL[metric](-logs, torch.zeros_like(logs), mask)
    if reduce in ("sum", "mean", "max"):
        values = over_row(values, mask, reduce)
    elif reduce != "token":
        raise ValueError(f"reduce {reduce!r}: token, sum, mean or max")
    return held(values).exp() if metric == "ratio" else values


def _weights(weight: Tensor, kept: Tensor, ratio: Tensor) -> Weights:
    return Weights(masked(weight, kept), kept, ratio)


def _inside(values: Tensor, low: float, high: float) -> Tensor:
    return (values >= low) & (values <= high)


def _check_range(low: float, high: float) -> None:
    if not low <= high:
        raise ValueError(f"low {low} must not be greater than high {high}")
