"""Estimators of the KL divergence from a reference, token by token (Schulman 2020, "Approximating KL divergence").

All take log-probabilities and mask of shape (B, R), with d = logprobs - ref_logprobs, and give (B, R), 0 under
the mask.
"""

from collections.abc import Callable, Mapping

from torch import Tensor

from asyncflow.algorithms.masked import masked
from asyncflow.algorithms.ratio import MAX_LOG_RATIO, held, log_ratio


def k1(logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor) -> Tensor:
    """d: unbiased, of either sign."""
    return log_ratio(logprobs, ref_logprobs, mask)


def k2(logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor) -> Tensor:
    """d² / 2: biased, never negative; its gradient is that of the divergence."""
    return log_ratio(logprobs, ref_logprobs, mask) ** 2 / 2


def k3(logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor) -> Tensor:
    """exp(-d) - 1 + d: unbiased and never negative; the exponent is held at 20 so that it stays finite."""
    distance = log_ratio(logprobs, ref_logprobs, mask)
    return (-distance).clamp(max=MAX_LOG_RATIO).expm1() + distance


KL: Mapping[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {"k1": k1, "k2": k2, "k3": k3}


def unbiased(tokens: Tensor, logprobs: Tensor, behaviour: Tensor, mask: Tensor) -> Tensor:
    """Weight an estimate (B, R) of tokens that another policy sampled with r = exp(logprobs - behaviour).

    The gradient goes through r and through the estimate: only so is it that of the divergence (for k1 and k3), in
    expectation over the behaviour's tokens. The behaviour gets none. DeepSeek-AI 2025, arXiv:2512.02556.
    """
    return held(log_ratio(logprobs, behaviour, mask)).exp() * masked(tokens, mask)
