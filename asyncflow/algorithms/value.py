"""The loss of a critic's values, token by token."""

from typing import NamedTuple

import torch
from torch import Tensor

from asyncflow.algorithms.masked import masked


class ValueTerms(NamedTuple):
    """Both of shape (B, R)."""

    token_loss: Tensor
    """0 under the mask."""
    clipped: Tensor
    """bool: the clip decided the loss; False under the mask."""


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, mask: Tensor, clip: float | None) -> ValueTerms:
    """½ max((V - G)², (clip(V, old - clip, old + clip) - G)²), without a clip ½ (V - G)²; tensors (B, R).

    Only `values` get a gradient. Schulman et al. 2017, arXiv:1707.06347, in the form of its reference code.
    """
    values, old, target = masked(values, mask), masked(old_values.detach(), mask), masked(returns.detach(), mask)
    free = (values - target) ** 2 / 2
    if clip is None:
        return ValueTerms(free, torch.zeros_like(free, dtype=torch.bool))
    bounded = (values.clamp(old - clip, old + clip) - target) ** 2 / 2
    return ValueTerms(torch.maximum(free, bounded), (bounded > free).detach())
