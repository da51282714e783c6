"""Frozen: what a model that is not trained says of each response token; the reference is one, the teacher another."""

from collections.abc import Callable, Mapping

import numpy as np

from asyncflow.backends import train_engine
from asyncflow.backends.base import ModelSpec, OptimSpec, TrainEngine
from asyncflow.config.model import Pipeline
from asyncflow.stage import Context
from asyncflow.stages.model import train_options
from asyncflow.storage import Batch
from asyncflow.storage.batch import Column
from asyncflow.types import Float32s, Int64s


class Frozen:
    """Reads prompt and response tokens; writes their log-probabilities at the sampling temperature to one column."""

    def __init__(self, column: str, model: Callable[[Context], ModelSpec | None]) -> None:
        """`model` describes the model; None if it is not there yet, but by the first batch it is."""
        self._column, self._model = column, model

    def setup(self, context: Context) -> None:
        """Make the engine, if its model is there: what is wrong with it then shows before anything is generated."""
        self._context, self._config = context, context.config
        spec = self._model(context)
        self._engine = None if spec is None else _engine(self._config, spec)

    def process(self, batch: Batch) -> Mapping[str, Column]:
        lengths = batch["response_tokens"].lengths.tolist()
        found: list[Float32s] = [np.empty(0, dtype=np.float32)] * len(batch)
        engine = self._engine = self._engine or self._late()
        for rows in self._parts(batch):
            for micro_batch in engine.micro_batches(batch.take(rows), self._config.train.token_budget, (), rows):
                logprobs = engine.logprobs(micro_batch).cpu().numpy()
                for row, own in zip(micro_batch.rows.tolist(), logprobs, strict=True):
                    found[row] = own[: lengths[row]]
        return {self._column: Column.of("list<float32>", found)}

    def _parts(self, batch: Batch) -> list[Int64s]:
        """Return rows that go together: where every bit counts, what lies beside a row must not depend on time."""
        if not self._config.deterministic:
            return [np.arange(len(batch))]
        groups = batch["group_id"].array
        return [np.flatnonzero(groups == group) for group in np.unique(groups)]

    def close(self) -> None:
        if self._engine is not None:
            self._engine.close()

    def _late(self) -> TrainEngine:
        spec = self._model(self._context)
        assert spec is not None
        return _engine(self._config, spec)


def _engine(config: Pipeline, spec: ModelSpec) -> TrainEngine:
    return train_engine(config.train.backend)(
        spec, optim=OptimSpec(), temperature=config.rollout.temperature, options=train_options(config)
    )
