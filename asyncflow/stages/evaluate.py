"""Evaluate: held-out responses with their scores and answers, handed to the flow."""

import logging
from collections.abc import Callable, Iterator

import numpy as np

from asyncflow.config.importing import resolve
from asyncflow.execute.messages import Evaluated, Scored
from asyncflow.stage import Context
from asyncflow.storage import Batch

log = logging.getLogger(__name__)


class Evaluate:
    """Reads `reward`, `reward_outcome`, `response_text` and `versions`."""

    def setup(self, context: Context) -> None:
        self._emit = context.emit
        answer = context.config.eval.answer
        self._find: Callable[[str], object] = str.strip if answer is None else resolve(answer)
        self._told = False

    def process(self, batch: Batch) -> None:
        self._emit(Evaluated(tuple(self._scored(batch))))

    def close(self) -> None:
        return None

    def _scored(self, batch: Batch) -> Iterator[Scored]:
        rows = zip(
            batch["row"].array.tolist(),
            batch["reward"].array.tolist(),
            batch["reward_outcome"].strings(),
            batch["response_text"].strings(),
            batch["versions"],
            strict=True,
        )
        for row, reward, outcome, text, versions in rows:
            yield Scored(row, reward, outcome, self._answer(text), tuple(np.unique(versions).tolist()))

    def _answer(self, text: str) -> str | None:
        """Find the answer in a response; one that the user's function fails with has none."""
        try:
            found = self._find(text)
        except Exception:  # the border to the user's code: no text may end the run
            if not self._told:
                log.warning("eval.answer failed with %r, which counts as no answer", text, exc_info=True)
            self._told = True
            return None
        return None if found is None else str(found)
