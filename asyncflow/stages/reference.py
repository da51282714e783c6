"""Reference: what the model that reinforcement learning began with says of each response token.

That is the model of the configuration or, after a warm-up, the one that the flow keeps in the run's folder.
"""

from collections.abc import Mapping

import numpy as np

from asyncflow.backends import train_engine
from asyncflow.backends.base import OptimSpec, TrainEngine
from asyncflow.data.tokenizer import tokenizer
from asyncflow.stage import Context
from asyncflow.stages.model import model_spec, train_options
from asyncflow.storage import Batch
from asyncflow.storage.batch import Column
from asyncflow.types import Float32s, Int64s

FOLDER = "reference"
"""Folder of a run that keeps the model after a warm-up, for a resumed run too."""


class Reference:
    """Reads prompt and response tokens; writes `ref_logprobs`, at the sampling temperature."""

    def setup(self, context: Context) -> None:
        self._config, self._kept = context.config, context.folder / FOLDER
        self._tokenizer = tokenizer(context.config.model)
        self._engine: TrainEngine | None = None

    def process(self, batch: Batch) -> Mapping[str, Column]:
        lengths = batch["response_tokens"].lengths.tolist()
        found: list[Float32s] = [np.empty(0, dtype=np.float32)] * len(batch)
        engine = self._engine = self._engine or self._load()
        for rows in self._parts(batch):
            for micro_batch in engine.micro_batches(batch.take(rows), self._config.train.token_budget, (), rows):
                logprobs = engine.logprobs(micro_batch).cpu().numpy()
                for row, own in zip(micro_batch.rows.tolist(), logprobs, strict=True):
                    found[row] = own[: lengths[row]]
        return {"ref_logprobs": Column.of("list<float32>", found)}

    def _parts(self, batch: Batch) -> list[Int64s]:
        """Return rows that go together: where every bit counts, what lies beside a row must not depend on time."""
        if not self._config.deterministic:
            return [np.arange(len(batch))]
        groups = batch["group_id"].array
        return [np.flatnonzero(groups == group) for group in np.unique(groups)]

    def close(self) -> None:
        if self._engine is not None:
            self._engine.close()

    def _load(self) -> TrainEngine:
        """Make the engine on the first batch: by then a warm-up has left the model that training begins with."""
        config = self._config
        return train_engine(config.train.backend)(
            model_spec(config, self._tokenizer, self._kept if self._kept.exists() else None),
            optim=OptimSpec(),
            temperature=config.rollout.temperature,
            options=train_options(config),
        )
