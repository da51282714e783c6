"""Reference: what the model that training began with says of each response token."""

from collections.abc import Mapping

import numpy as np

from asyncflow.backends import train_engine
from asyncflow.backends.base import OptimSpec
from asyncflow.data.tokenizer import tokenizer
from asyncflow.stage import Context
from asyncflow.stages.model import model_spec
from asyncflow.storage import Batch
from asyncflow.storage.batch import Column


class Reference:
    """Reads prompt and response tokens; writes `ref_logprobs`, at the sampling temperature."""

    def setup(self, context: Context) -> None:
        config = context.config
        self._budget = config.train.token_budget
        self._engine = train_engine(config.train.backend)(
            model_spec(config, tokenizer(config.model)),
            optim=OptimSpec(),
            temperature=config.rollout.temperature,
            options=config.train.options,
        )

    def process(self, batch: Batch) -> Mapping[str, Column]:
        responses = batch["response_tokens"]
        values = np.empty(len(responses.values), dtype=np.float32)
        for micro_batch in self._engine.micro_batches(batch, self._budget, (), np.arange(len(batch))):
            logprobs = self._engine.logprobs(micro_batch).numpy()
            for row, own in zip(micro_batch.rows.tolist(), logprobs, strict=True):
                start, end = responses.offsets[row : row + 2]
                values[start:end] = own[: end - start]
        return {"ref_logprobs": Column.ragged(values, responses.offsets, "list<float32>")}

    def close(self) -> None:
        self._engine.close()
