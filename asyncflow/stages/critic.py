"""Critic: what the critic expects of each response before each of its tokens, as the last step left it."""

from collections.abc import Mapping

from asyncflow.stage import Context
from asyncflow.stages.valuer import Valuer
from asyncflow.storage import Batch
from asyncflow.storage.batch import Column


class Critic:
    """Reads prompt and response tokens; writes `values`."""

    def setup(self, context: Context) -> None:
        self._context, self._valuer = context, Valuer.of(context)

    def process(self, batch: Batch) -> Mapping[str, Column] | None:
        with self._valuer.trainer.lock:
            found = self._valuer.values(batch, self._context)
        return None if found is None else {"values": found}

    def close(self) -> None:
        """Leave the engine to the trainer, which may still be writing what it copied."""
