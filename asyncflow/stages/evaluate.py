"""Evaluate: the scores of held-out responses, handed to the flow."""

from collections import Counter

from asyncflow.execute.messages import Evaluated
from asyncflow.stage import Context
from asyncflow.storage import Batch


class Evaluate:
    """Reads `reward` and `reward_outcome`."""

    def setup(self, context: Context) -> None:
        self._emit = context.emit

    def process(self, batch: Batch) -> None:
        self._emit(Evaluated(batch["reward"].array.copy(), Counter(batch["reward_outcome"].strings())))

    def close(self) -> None:
        return None
