"""Where the time went: what each replica of each stage did with its own, from the batches that it has finished.

Time counts from when the first rows were taken of the table, so that nobody is said to have waited for the run to
begin. A replica that works on several batches at once, each in a lane of its own, is the mean of its lanes: one that
works in half of them is half busy. A stage is shown by its worst replica, the one that was busy most.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from asyncflow.execute.messages import Worked

STATES = ("busy", "idle", "blocked")


@dataclass(slots=True)
class Spent:
    """Seconds of all lanes of a replica, and rows that it finished."""

    rows: int = 0
    busy: float = 0.0
    idle: float = 0.0
    """Waiting for rows."""
    blocked: float = 0.0
    """Waiting for the queue."""

    def shares(self) -> dict[str, float]:
        """Return the shares of the time, which add up to 1."""
        total = self.busy + self.idle + self.blocked
        if not total:
            return {"busy": 0.0, "idle": 1.0, "blocked": 0.0}
        return {state: float(getattr(self, state)) / total for state in STATES}

    def per_second(self) -> dict[str, int]:
        """Return the milliseconds of each second, which add up to 1000."""
        exact = {state: 1000 * share for state, share in self.shares().items()}
        whole = {state: int(value) for state, value in exact.items()}
        left = 1000 - sum(whole.values())
        for state in sorted(exact, key=lambda state: whole[state] - exact[state])[:left]:
            whole[state] += 1
        return whole


@dataclass(slots=True)
class Times:
    """Counts batches of the train table."""

    stages: dict[str, dict[str, Spent]] = field(default_factory=dict)
    """By stage, and replica."""
    begun: float | None = None
    """When the first rows were taken, by the monotonic clock."""

    def add(self, worked: Worked) -> None:
        """Count one batch."""
        if worked.table != "train":
            return
        leased = worked.started + worked.idle
        if self.begun is None:
            self.begun = leased
        spent = self.stages.setdefault(worked.stage, {}).setdefault(worked.replica, Spent())
        spent.rows += worked.rows
        spent.busy += worked.busy
        spent.idle += max(0.0, leased - max(worked.started, self.begun))
        spent.blocked += worked.blocked

    def worst(self, stage: str) -> tuple[str, Spent]:
        """Return the replica of a stage that was busy most."""
        return max(self.stages[stage].items(), key=lambda item: item[1].shares()["busy"])

    def rows(self, stage: str) -> int:
        """Return how many rows all replicas of a stage have finished."""
        return sum(spent.rows for spent in self.stages[stage].values())

    @property
    def bottleneck(self) -> str | None:
        """The stage whose worst replica was busy most: the run gets faster if this one does."""
        return max(self.stages, key=lambda stage: self.worst(stage)[1].shares()["busy"], default=None)

    def replicas(self) -> Iterator[tuple[str, str, Spent]]:
        """Yield stage, replica and what it did."""
        for stage, replicas in self.stages.items():
            for replica, spent in sorted(replicas.items()):
                yield stage, replica, spent

    def per_second(self) -> Mapping[str, Mapping[str, Mapping[str, int]]]:
        """Return the milliseconds of each second by stage, replica and state."""
        return {
            stage: {replica: spent.per_second() for replica, spent in sorted(replicas.items())}
            for stage, replicas in self.stages.items()
        }
