"""How far probability ratios spread, as counts that are added over micro-batches and ranks.

Sizes of log-ratios are counted in fixed bins, four to each doubling: a quantile read from the counts is right to
within its bin, a fifth of its size. Reading needs no torch.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

_OCTAVES = 24
BOUNDS: tuple[float, ...] = tuple(20.0 * 2.0 ** (step / 4 - _OCTAVES) for step in range(4 * _OCTAVES + 1))
"""Upper bounds of the bins, from the rounding of float32 to `ratio.MAX_LOG_RATIO`; the first bin begins at 0."""


def spread(log_ratios: "Tensor", mask: "Tensor") -> list[int]:
    """Count |log-ratio| (B, R) of the trained tokens by bin; what lies above the last bound is in the last bin."""
    import torch

    sizes = log_ratios.detach()[mask != 0].abs().double()
    bounds = torch.tensor(BOUNDS, dtype=torch.float64, device=sizes.device)
    bins = torch.bucketize(sizes, bounds).clamp(max=len(BOUNDS) - 1)
    counts: list[int] = torch.bincount(bins, minlength=len(BOUNDS)).tolist()
    return counts


def merge(counts: Sequence[int], others: Sequence[int]) -> list[int]:
    """Add two spreads."""
    return [count + other for count, other in zip(counts, others, strict=True)]


def quantiles(counts: Sequence[int], at: Sequence[float]) -> list[float]:
    """Return the |log-ratio| below which each share `at` (0 to 1) of the tokens lies, 0 of no tokens."""
    return [_quantile(counts, list(accumulate(counts)), share) for share in at]


def _quantile(counts: Sequence[int], upto: Sequence[int], share: float) -> float:
    if not 0 <= share <= 1:
        raise ValueError(f"quantile {share} must be between 0 and 1")
    rank = share * upto[-1]
    position = next((i for i, count in enumerate(counts) if count and upto[i] >= rank), None)
    if position is None:
        return 0.0
    low = BOUNDS[position - 1] if position else 0.0
    within = (rank - (upto[position] - counts[position])) / counts[position]
    return low + (BOUNDS[position] - low) * within
