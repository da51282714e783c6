"""Reward: responses in, scores out, by the user's function in processes that can be killed.

A score that took too long, an error and an absent score are outcomes of their own, never the number 0 by accident:
each has the consequence that the user chose. A row that leaves has its reason; one that stays has its outcome beside
its reward.
"""

from collections.abc import Iterator

import numpy as np

from asyncflow.execute.messages import Command, Stop, Trouble
from asyncflow.rewards.outcome import UNUSUAL
from asyncflow.rewards.policy import Policy
from asyncflow.rewards.pool import Outcome, RewardPool, Sample
from asyncflow.rewards.spec import RewardSpec
from asyncflow.rewards.troubles import Troubles
from asyncflow.stage import Context, Drop, Part
from asyncflow.storage import Batch


class Reward:
    """Reads the texts and the item; writes `reward` and `reward_outcome`."""

    def setup(self, context: Context) -> None:
        config = context.config.reward
        self._emit, self._policy = context.emit, Policy.of(config)
        self._troubles = Troubles(context.config.rows_per_step)
        self._pool = RewardPool(
            RewardSpec.of(context.config),
            workers=config.workers,
            timeout=float(config.timeout),
            start_timeout=float(context.config.executor.start_timeout),
        )
        self._pool.start()

    def process(self, batch: Batch) -> Iterator[Part | Drop]:
        outcomes = self._score(batch)
        rewards = np.array([self._policy.reward(outcome) for outcome in outcomes], dtype=np.float64)  # None is NaN
        statuses = np.array([outcome.status for outcome in outcomes])
        left = np.isnan(rewards)
        stay = np.flatnonzero(~left)
        if stay.size:
            yield Part(stay, Batch({"reward": rewards[stay], "reward_outcome": statuses[stay].tolist()}))
        for outcome in UNUSUAL:
            rows = np.flatnonzero(left & (statuses == outcome))
            if rows.size:
                yield Drop(rows, f"reward_{outcome}")

    def command(self, command: Command) -> None:
        """End what is being scored when the run ends early."""
        if isinstance(command, Stop):
            self._pool.close()

    def close(self) -> None:
        self._pool.close()

    def _score(self, batch: Batch) -> list[Outcome]:
        """Score every row, and tell the flow of what met trouble before it hears of what has left."""
        outcomes, retried = self._policy.score(self._pool.score, _samples(batch))
        last, replaced = self._troubles.note(outcomes), self._troubles.fresh(self._pool.replaced)
        if last or retried or replaced:
            self._emit(Trouble(last, retried, replaced))
        self._troubles.check(last)
        return outcomes


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
