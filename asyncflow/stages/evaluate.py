"""Evaluate: the scores of held-out responses, handed to the flow."""

from asyncflow.execute.messages import Evaluated
from asyncflow.stage import Context
from asyncflow.storage import Batch


class Evaluate:
    """Reads `reward`."""

    def setup(self, context: Context) -> None:
        self._emit = context.emit

    def process(self, batch: Batch) -> None:
        self._emit(Evaluated(batch["reward"].array.copy()))

    def close(self) -> None:
        return None
