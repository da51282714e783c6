"""Log-ratios of two policies: between which bounds they are held, and how those of a row become one."""

from typing import Literal

import torch
from torch import Tensor

from asyncflow.algorithms.masked import masked

MAX_LOG_RATIO = 20.0
"""Log-ratios are held within this of 0, so that `exp` stays finite and a clipped token has gradient 0, not 0 x inf."""


def log_ratio(logprobs: Tensor, other: Tensor, mask: Tensor) -> Tensor:
    """Return logprobs - other, 0 under the mask; `other` gets no gradient. All of shape (B, R)."""
    return masked(logprobs, mask) - masked(other.detach(), mask)


def held(log_ratios: Tensor) -> Tensor:
    """Hold log-ratios within `MAX_LOG_RATIO`; beyond it their gradient is 0."""
    return log_ratios.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def over_row(values: Tensor, mask: Tensor, how: Literal["sum", "mean", "max"]) -> Tensor:
    """Reduce each row over its trained tokens, to (B, 1); without any, sum and mean are 0, and max is -inf."""
    if how == "max":
        trained = torch.where(mask != 0, values, -torch.inf)
        return torch.nn.functional.pad(trained, (0, 1), value=-torch.inf).amax(dim=1, keepdim=True)
    total = masked(values, mask).sum(dim=1, keepdim=True)
    return total if how == "sum" else total / (mask != 0).sum(dim=1, keepdim=True).clamp(min=1)
