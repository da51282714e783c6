"""Policy losses of single tokens, before aggregation.

All have the signature of `pg`: log-probabilities and mask (B, R), advantages (B,) or (B, R), and how far the ratio
r = exp(logprobs - old_logprobs) may fall below and rise above 1. Only the current log-probabilities get a gradient.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from asyncflow.algorithms.masked import masked
from asyncflow.algorithms.ratio import held, log_ratio, over_row


class PolicyTerms(NamedTuple):
    """All of shape (B, R)."""

    token_loss: Tensor
    """0 under the mask."""
    ratio: Tensor
    """Current over old probability, detached; 1 under the mask. That of the sequence where the loss takes it."""
    clipped: Tensor
    """bool: the clip decided the loss; False under the mask."""


def ppo_clip(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> PolicyTerms:
    """max(-r A, -clip(r, 1 - clip_low, 1 + clip_high) A), where A < 0 at most -dual_clip A.

    Schulman et al. 2017, arXiv:1707.06347; two bounds: Yu et al. 2025, arXiv:2503.14476; the bound for negative
    advantages, greater than 1: Ye et al. 2020, arXiv:1912.09729.
    """
    if dual_clip is not None and not dual_clip > 1:
        raise ValueError(f"dual_clip {dual_clip} must be greater than 1")
    advantages = _per_token(advantages, mask)
    ratio = held(log_ratio(logprobs, old_logprobs, mask)).exp()
    terms = _clipped(ratio, advantages, clip_low, clip_high)
    return terms if dual_clip is None else _bounded(terms, advantages, dual_clip)


def gspo(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, clip_low: float, clip_high: float
) -> PolicyTerms:
    """The clip of PPO on the sequence's ratio s, the geometric mean of r over its trained tokens.

    Every trained token of a row carries the loss of the row. Zheng et al. 2025, arXiv:2507.18071.
    """
    ratio = _sequence_ratio(logprobs, old_logprobs, mask)
    return _clipped(ratio, _per_token(advantages, mask), clip_low, clip_high)


def gspo_token(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, clip_low: float, clip_high: float
) -> PolicyTerms:
    """The values of `gspo`, the gradient through the token: the ratio is sg(s) π / sg(π).

    For advantages of single tokens. With one advantage for a row, mean over tokens and then over rows, its gradient
    is that of `gspo`.
    """
    current = masked(logprobs, mask)
    ratio = _sequence_ratio(logprobs.detach(), old_logprobs, mask) * (current - current.detach()).exp()
    return _clipped(ratio, _per_token(advantages, mask), clip_low, clip_high)


def cispo(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, clip_low: float, clip_high: float
) -> PolicyTerms:
    """-sg(clip(r, 1 - clip_low, 1 + clip_high)) A logπ: a clipped token keeps its gradient, its weight is bounded.

    A `clip_low` of 1 or more switches the lower bound off. MiniMax 2025, arXiv:2506.13585.
    """
    ratio = held(log_ratio(logprobs.detach(), old_logprobs, mask)).exp()
    weight = ratio.clamp(1 - clip_low, 1 + clip_high)
    return PolicyTerms(-weight * _per_token(advantages, mask) * masked(logprobs, mask), ratio, weight != ratio)


def pg(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, clip_low: float, clip_high: float
) -> PolicyTerms:
    """-A logπ, the plain policy gradient; the ratio is only reported, and the bounds are not read."""
    ratio = held(log_ratio(logprobs.detach(), old_logprobs, mask)).exp()
    loss = -_per_token(advantages, mask) * masked(logprobs, mask)
    return PolicyTerms(loss, ratio, torch.zeros_like(ratio, dtype=torch.bool))


POLICIES: Mapping[str, Callable[..., PolicyTerms]] = {
    "ppo": ppo_clip,
    "gspo": gspo,
    "gspo-token": gspo_token,
    "cispo": cispo,
    "pg": pg,
}
"""By name; `ppo` alone takes `dual_clip`."""


def _per_token(advantages: Tensor, mask: Tensor) -> Tensor:
    return masked(advantages if advantages.ndim == mask.ndim else advantages[:, None], mask).detach()


def _sequence_ratio(logprobs: Tensor, old_logprobs: Tensor, mask: Tensor) -> Tensor:
    mean = over_row(log_ratio(logprobs, old_logprobs, mask), mask, "mean")
    return masked(held(mean), mask).exp()


def _clipped(ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float) -> PolicyTerms:
    free = -ratio * advantages
    bounded = -ratio.clamp(1 - clip_low, 1 + clip_high) * advantages
    return PolicyTerms(torch.maximum(free, bounded), ratio.detach(), (bounded > free).detach())


def _bounded(terms: PolicyTerms, advantages: Tensor, dual_clip: float) -> PolicyTerms:
    most = torch.where(advantages < 0, -dual_clip * advantages, torch.inf)
    loss = torch.minimum(terms.token_loss, most)
    return PolicyTerms(loss, terms.ratio, terms.clipped | (loss < terms.token_loss).detach())
