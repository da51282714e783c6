"""A training engine that takes the time that a cost model says; its weights are real bytes, and mean nothing."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from asyncflow.algorithms.report import Report
from asyncflow.backends.base import ALONE, Loss, MicroBatch, ModelSpec, OptimSpec, Ranks, StepReport
from asyncflow.backends.costs import TrainCosts
from asyncflow.backends.train.cut import cut
from asyncflow.errors import ConfigError
from asyncflow.storage.batch import Batch
from asyncflow.types import RowIds, Version


class EmulatedTrainer:
    """A `TrainEngine` of one process; its options are the fields of `TrainCosts`."""

    def __init__(
        self,
        model: ModelSpec,
        *,
        optim: OptimSpec,
        temperature: float,
        options: Mapping[str, object],
        ranks: Ranks = ALONE,
    ) -> None:
        if ranks.size > 1:
            raise ConfigError("train.data_parallel: the emulated engine is one process; give it lower costs instead")
        self._costs, self._pad, self._head = TrainCosts.of(options), model.pad_token, model.head
        self._weights = torch.zeros(max(1, int(self._costs.weights) // 4))
        self._version = 0
        self._tokens = 0

    @property
    def version(self) -> Version:
        """Number of optimizer steps behind the weights."""
        return self._version

    @property
    def data_parallel(self) -> tuple[int, int]:
        """(0, 1): one process."""
        return 0, 1

    def exchange(self, data: bytes) -> list[bytes]:
        """Return what the only rank gave."""
        return [data]

    def micro_batches(
        self,
        batch: Batch,
        token_budget: int,
        columns: Sequence[str],
        rows: RowIds | None = None,
        *,
        alone: bool = False,
    ) -> Iterator[MicroBatch]:
        """Cut rows into micro-batches, as the torch engine does."""
        return cut(batch, token_budget, columns, rows, pad=self._pad, device=torch.device("cpu"))[1]

    def forward_backward(self, micro_batch: MicroBatch, loss: Loss, *, entropy: bool = False) -> Report:
        """Take the time of the tokens; reports a loss of 0 on equal log-probabilities, or on values of 0."""
        with _taking(self._costs.scale * self._costs.token * float(micro_batch.attention.sum())):
            tokens = float(micro_batch.mask.sum())
        if self._head == "value":
            return {"value_loss": 0.0, "value_clipped": 0.0, "tokens": tokens}
        return {"loss": 0.0, "tokens": tokens, "ratio": tokens, "gap": 0.0, "ratio_max": 1.0, "gap_max": 0.0}

    def optim_step(self, lr: float, scale: float = 1.0) -> StepReport:
        """Take the time of a step; one number of the weights becomes the version."""
        with _taking(self._costs.scale * self._costs.step):
            self._version += 1
            self._weights[0] = self._version
        return StepReport(self._version, 0.0, lr)

    def logprobs(self, micro_batch: MicroBatch) -> Tensor:
        """Take a third of the time of training; -1 for each token."""
        with _taking(self._costs.scale * self._costs.token / 3 * float(micro_batch.attention.sum())):
            return torch.full_like(micro_batch.mask, -1.0)

    def values(self, micro_batch: MicroBatch) -> Tensor:
        """Take a third of the time of training; 0 for each token."""
        return torch.zeros_like(self.logprobs(micro_batch))

    def export_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the only tensor, as a copy."""
        yield "weights", self._weights.clone()

    def snapshot(self) -> Callable[[Path], None]:
        """Copy nothing, and write nothing: there is no model."""
        return lambda folder: None

    def state(self) -> dict[str, object]:
        """The version."""
        return {"version": self._version}

    def load_state(self, state: dict[str, object]) -> None:
        """Go on with a version."""
        self._version = cast("int", state["version"])

    def sleep(self) -> None:
        """Nothing lies on an accelerator."""

    def wake(self) -> None:
        """Nothing lies on an accelerator."""

    def close(self) -> None:
        """Free the weights."""
        self._weights = torch.zeros(1)


@contextmanager
def _taking(seconds: float) -> Iterator[None]:
    """Let a block take so many seconds, its own time included."""
    end = time.monotonic() + seconds
    yield
    time.sleep(max(0.0, end - time.monotonic()))
