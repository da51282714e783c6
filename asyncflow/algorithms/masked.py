"""The one place where values under a mask are made harmless."""

import torch
from torch import Tensor


def masked(values: Tensor, mask: Tensor) -> Tensor:
    """Return `values` in float32 or better, with 0 wherever `mask` is 0.

    To be called before any `exp`: what stood under the mask (NaN, infinity, -9999) reaches neither value nor
    gradient. Shapes broadcast.
    """
    values = values.to(torch.promote_types(values.dtype, torch.float32))
    return torch.where(mask != 0, values, torch.zeros((), dtype=values.dtype, device=values.device))
