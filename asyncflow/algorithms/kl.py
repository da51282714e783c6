"""Estimators of the KL divergence from a reference, token by token (Schulman 2020, "Approximating KL divergence").

All take log-probabilities and mask of shape (B, R), with d = logprobs - ref_logprobs, and give (B, R), 0 under
the mask.
"""

from collections.abc import Callable, Mapping

from torch import Tensor

from asyncflow.algorithms.masked import masked

_MAX_EXPONENT = 20.0


def _distance(logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor) -> Tensor:
    return masked(logprobs, mask) - masked(ref_logprobs.detach(), mask)


def k1(logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor) -> Tensor:
    """d: unbiased, of either sign."""
    return _distance(logprobs, ref_logprobs, mask)


def k2(logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor) -> Tensor:
    """d² / 2: biased, never negative; its gradient is that of the divergence."""
    return _distance(logprobs, ref_logprobs, mask) ** 2 / 2


def k3(logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor) -> Tensor:
    """exp(-d) - 1 + d: unbiased and never negative; the exponent is held at 20 so that it stays finite."""
    distance = _distance(logprobs, ref_logprobs, mask)
    return (-distance).clamp(max=_MAX_EXPONENT).expm1() + distance


KL: Mapping[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {"k1": k1, "k2": k2, "k3": k3}
