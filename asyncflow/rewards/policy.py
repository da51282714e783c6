"""What becomes of a response that got no score, as `reward.on_timeout`, `on_error` and `on_unscored` say."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from asyncflow.config.fields import OnOutcome
from asyncflow.config.model import Reward as RewardConfig
from asyncflow.errors import RewardError
from asyncflow.rewards.outcome import Outcome, Status
from asyncflow.rewards.signature import Sample


@dataclass(frozen=True, slots=True)
class Policy:
    """The user's choice for each outcome but `ok`."""

    choices: Mapping[Status, OnOutcome]
    retries: int

    @classmethod
    def of(cls, config: RewardConfig) -> "Policy":
        """Take the choices from the configuration."""
        choices: dict[Status, OnOutcome] = {
            "timeout": config.on_timeout,
            "error": config.on_error,
            "unscored": config.on_unscored,
        }
        return cls(choices, config.retries)

    def score(
        self, score: Callable[[Sequence[Sample]], list[Outcome]], samples: Sequence[Sample]
    ) -> tuple[list[Outcome], int]:
        """Score samples, and those again that are to be; return the last outcome of each, and how often that was."""
        outcomes, retried = score(samples), 0
        for _ in range(self.retries):
            again = [row for row, outcome in enumerate(outcomes) if self.choices.get(outcome.status) == "retry"]
            if not again:
                break
            retried += len(again)
            for row, outcome in zip(again, score([samples[row] for row in again]), strict=True):
                outcomes[row] = outcome
        return outcomes, retried

    def reward(self, outcome: Outcome) -> float | None:
        """Return the reward of a row that stays, and None for one that leaves; RewardError if the run is to end."""
        if outcome.status == "ok":
            return outcome.value
        choice = self.choices[outcome.status]
        if choice == "error":
            why = f"reward.on_{outcome.status} is `error`"
            raise RewardError(f"scoring a response ended with {outcome} ({why})")
        return 0.0 if choice == "zero" else None
