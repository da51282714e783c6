"""Policy losses of single tokens, before aggregation."""

from typing import NamedTuple

import torch
from torch import Tensor

from asyncflow.algorithms.masked import masked

MAX_LOG_RATIO = 20.0
"""Log-ratios are held within this of 0, so that `exp` stays finite and a clipped token has gradient 0, not 0 x inf."""


class PolicyTerms(NamedTuple):
    """All of shape (B, R)."""

    token_loss: Tensor
    """0 under the mask."""
    ratio: Tensor
    """Current over old probability, detached; 1 under the mask."""
    clipped: Tensor
    """bool: the clip decided the loss; False under the mask."""


def ppo_clip(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, clip_low: float, clip_high: float
) -> PolicyTerms:
    """max(-r A, -clip(r, 1 - clip_low, 1 + clip_high) A) with r = exp(logprobs - old_logprobs).

    Log-probabilities and mask are (B, R), advantages (B,) or (B, R). Schulman et al. 2017, arXiv:1707.06347;
    two bounds: Yu et al. 2025, arXiv:2503.14476.
    """
    advantages = masked(advantages if advantages.ndim == mask.ndim else advantages[:, None], mask)
    log_ratio = masked(logprobs, mask) - masked(old_logprobs.detach(), mask)
    ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    free = -ratio * advantages
    bounded = -ratio.clamp(1 - clip_low, 1 + clip_high) * advantages
    return PolicyTerms(torch.maximum(free, bounded), ratio.detach(), (bounded > free).detach())
