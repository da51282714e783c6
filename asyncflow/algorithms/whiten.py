"""Whitening over all trained tokens of a step, wherever their rows are: each rank counts, the counts are added.

Standard deviations are unbiased, as in `advantages`. Values without spread, or a single one, are whitened to 0.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from asyncflow.algorithms.advantages import NO_SIGNAL
from asyncflow.algorithms.masked import masked


@dataclass(frozen=True, slots=True)
class Moments:
    """Of the trained values of a rank, or of several ranks by addition."""

    count: int = 0
    total: float = 0.0
    """Sum of the values."""
    squares: float = 0.0
    """Sum of their squared distances from their own mean, so that a large mean costs no digits."""

    @property
    def mean(self) -> float:
        """Mean, 0 of nothing."""
        return self.total / max(1, self.count)

    @property
    def std(self) -> float:
        """Unbiased standard deviation, 0 of fewer than two values."""
        return float((self.squares / max(1, self.count - 1)) ** 0.5)

    def __add__(self, other: "Moments") -> "Moments":
        """Merge (Chan et al. 1979): the distance of the two means adds to the squares."""
        count = self.count + other.count
        between = (self.mean - other.mean) ** 2 * self.count * other.count / max(1, count)
        return Moments(count, self.total + other.total, self.squares + other.squares + between)


def moments(values: Tensor, mask: Tensor) -> Moments:
    """Measure the values (B, R) of the trained tokens, in float64."""
    trained = masked(values.detach().double(), mask)
    count, total = int((mask != 0).sum()), float(trained.sum())
    centred = masked(trained - total / max(1, count), mask)
    return Moments(count, total, float((centred**2).sum()))


def whiten(values: Tensor, mask: Tensor, moments: Moments) -> Tensor:
    """Return (values - mean) / (std + 1e-6) in float64, 0 under the mask and where the std is at most `NO_SIGNAL`."""
    if moments.std <= NO_SIGNAL:
        return torch.zeros(mask.shape, dtype=torch.float64, device=values.device)
    return masked((values.detach().double() - moments.mean) / (moments.std + 1e-6), mask)
