"""What must be known of all rows of a step before its gradient begins, where the loss says so.

Advantages that are whitened, and parts of the loss that leave rows out, depend on every row of the step, on every
rank. All others are added to the gradient as they come, and divided at the end.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace

import msgspec
import numpy as np
import torch
from torch import Tensor

from asyncflow.algorithms.aggregate import Denominators, denominators
from asyncflow.algorithms.loss import PolicyLoss
from asyncflow.algorithms.whiten import Moments, moments, whiten
from asyncflow.stages.trainer import Trainer
from asyncflow.storage import Batch
from asyncflow.storage.batch import Column


class Measured(msgspec.Struct):
    """Moments of what a rank has, as it tells them to the others."""

    count: int
    total: float
    squares: float

    @classmethod
    def of(cls, found: Moments) -> "Measured":
        """Make the message."""
        return cls(found.count, found.total, found.squares)

    @staticmethod
    def sum(said: Iterable["Measured"]) -> Moments:
        """Return the moments of all ranks together."""
        return sum((Moments(each.count, each.total, each.squares) for each in said), Moments())


class Counted(msgspec.Struct):
    """What a rank's rows count, (tokens, sequences): in all, and in each part of the loss that leaves some out."""

    step: tuple[int, int]
    parts: dict[str, tuple[int, int]]


def whitened(rows: Batch, trainer: Trainer) -> Batch:
    """Bring the advantages of the step's trained tokens to mean 0 and variance 1, over all ranks."""
    advantage, mask = rows["advantage"], rows["response_mask"]
    assert advantage.offsets is not None
    # One long row: whitening knows no rows.
    values, trained = (torch.from_numpy(each.values.copy())[None] for each in (advantage, mask))
    step = Measured.sum(trainer.exchange(Measured.of(moments(values, trained))))
    made = whiten(values, trained, step)[0].numpy().astype(np.float32)
    return rows.with_columns({"advantage": Column.ragged(made, advantage.offsets, "list<float32>")})


def with_denominators(rows: Batch, loss: PolicyLoss, trainer: Trainer) -> PolicyLoss:
    """Return the loss with what its parts are divided by, over all ranks."""
    mask, columns = _padded(rows["response_mask"]), _columns(rows)
    parts = {part: denominators(loss.counts(part, mask, columns)) for part in loss.filters}
    whole = denominators(mask)
    mine = Counted((whole.tokens, whole.sequences), {part: (own.tokens, own.sequences) for part, own in parts.items()})
    said = trainer.exchange(mine)
    filtered = {part: _sum([each.parts[part] for each in said]) for part in loss.filters}
    return replace(loss, denominators=_sum([each.step for each in said]), filtered=filtered)


def _sum(counts: list[tuple[int, int]]) -> Denominators:
    return sum((Denominators(*each) for each in counts), Denominators(0, 0))


def _columns(rows: Batch) -> Mapping[str, Tensor]:
    """Return what filters look at."""
    return {name: _padded(rows[name]) for name in ("advantage", "truncated") if name in rows.names}


def _padded(column: Column) -> Tensor:
    values = column.array if column.offsets is None else column.to_padded()[0]
    return torch.from_numpy(values.copy())
