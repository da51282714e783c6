"""From token losses to one number, so that the parts of a step add up to the whole.

The denominators belong to the optimizer step: they are counted once, over the rows of all micro-batches and all
ranks, before anything is rejected. Rejected tokens then carry loss 0 and stay in the mask. Rows without a
trained token count nowhere. A step whose rows come one by one is added up undivided, and its gradient divided once:
every loss has one denominator, whichever the aggregate.
"""

from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt
from torch import Tensor

from asyncflow.algorithms.masked import masked

Aggregate = Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"]
AGGREGATES: tuple[Aggregate, ...] = get_args(Aggregate)


@dataclass(frozen=True, slots=True)
class Denominators:
    """What the losses of one optimizer step are divided by; those of several ranks are added."""

    tokens: int
    """Trained tokens."""
    sequences: int
    """Rows with at least one trained token."""

    def share(self, how: Aggregate) -> float:
        """Return what sums over `UNDIVIDED` are multiplied by, so that they are as if divided by these."""
        return 1 / max(1, self.tokens if how == "token-mean" else self.sequences)

    def __add__(self, other: "Denominators") -> "Denominators":
        return Denominators(self.tokens + other.tokens, self.sequences + other.sequences)


UNDIVIDED = Denominators(1, 1)
"""For losses that are added up while the step is not whole: all are divided at its end, by `Denominators.share`."""


def denominators(mask: npt.ArrayLike, offsets: npt.NDArray[np.int64] | None = None) -> Denominators:
    """Count a mask: a padded one (N, R), or the flat values of a ragged one with its offsets int64 (N + 1,)."""
    trained = np.asarray(mask) != 0
    counts = trained.sum(axis=1) if offsets is None else np.diff(np.append(0, np.cumsum(trained))[offsets])
    return Denominators(int(counts.sum()), int((counts > 0).sum()))


def aggregate(
    token_loss: Tensor, mask: Tensor, how: Aggregate, step: Denominators, length: float | None = None
) -> Tensor:
    """Reduce token losses (B, R) to a float64 scalar, this micro-batch's share of the step's loss.

    token-mean: Σ mL / tokens. seq-mean-token-mean: Σ_rows (Σ mL / Σ m) / sequences. seq-mean-token-sum:
    Σ mL / sequences. seq-mean-token-sum-norm: the same over a constant `length`.
    """
    losses = masked(token_loss, mask).double()
    sequences = max(1, step.sequences)
    if how == "token-mean":
        return losses.sum() / max(1, step.tokens)
    if how == "seq-mean-token-mean":
        return (losses.sum(dim=1) / (mask != 0).sum(dim=1).clamp(min=1)).sum() / sequences
    if how == "seq-mean-token-sum":
        return losses.sum() / sequences
    if how == "seq-mean-token-sum-norm" and length is not None and length > 0:
        return losses.sum() / length / sequences
    raise ValueError(f"aggregate {how!r} with length {length}: one of {', '.join(AGGREGATES)}; the last needs a length")
