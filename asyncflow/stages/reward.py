"""Reward: responses in, scores out, by the user's function in processes that can be killed.

A score that took too long, an error and an absent score are outcomes of their own, never the number 0 by accident:
a row without a score leaves the run with its reason, and the run goes on.
"""

from collections.abc import Iterator

import numpy as np

from asyncflow.errors import RewardError
from asyncflow.execute.messages import Command, Stop
from asyncflow.rewards.pool import Outcome, RewardPool, Sample
from asyncflow.rewards.spec import RewardSpec
from asyncflow.stage import Context, Drop, Part
from asyncflow.storage import Batch


class Reward:
    """Reads the texts and the item; writes `reward`."""

    def setup(self, context: Context) -> None:
        config = context.config.reward
        self._policy = {"timeout": config.on_timeout, "error": config.on_error, "no_score": "drop"}
        self._pool = RewardPool(
            RewardSpec.of(context.config),
            workers=config.workers,
            timeout=float(config.timeout),
            start_timeout=float(context.config.executor.start_timeout),
        )
        self._pool.start()

    def process(self, batch: Batch) -> Iterator[Part | Drop]:
        outcomes = self._pool.score(_samples(batch))
        scores = np.array([self._value(row, outcome) for row, outcome in enumerate(outcomes)], dtype=np.float64)
        scored = np.flatnonzero(~np.isnan(scores))
        if scored.size:
            yield Part(scored, Batch({"reward": scores[scored]}))
        reasons = np.array([outcome.status for outcome in outcomes])
        for reason in sorted(set(reasons[np.isnan(scores)].tolist())):
            yield Drop(np.flatnonzero(np.isnan(scores) & (reasons == reason)), f"reward_{reason}")

    def command(self, command: Command) -> None:
        """End what is being scored when the run ends early."""
        if isinstance(command, Stop):
            self._pool.close()

    def close(self) -> None:
        self._pool.close()

    def _value(self, row: int, outcome: Outcome) -> float:
        if outcome.status == "ok":
            assert outcome.value is not None
            return outcome.value
        policy = self._policy[outcome.status]
        if policy == "error":
            raise RewardError(f"scoring response {row} of its batch ended with {outcome.status}: {outcome.detail}")
        return 0.0 if policy == "zero" else float("nan")


def _samples(batch: Batch) -> list[Sample]:
    texts = zip(
        batch["prompt_text"].strings(),
        batch["response_text"].strings(),
        batch["answer_text"].strings(),
        batch["item"].strings(),
        batch["source"].strings(),
        strict=True,
    )
    return [Sample(prompt=p, response=r, answer=a, item=i, source=s) for p, r, a, i, s in texts]
