"""Where the time went: what each replica of each stage did with its own, from the batches that it has finished.

A replica is busy while it works on any of its batches, blocked while all that it has wait for the queue, and idle
while it has none. Time counts from when the first rows of the train table were taken to when the last ones were
finished, for every replica, so that these are shares of the same whole. A stage is shown by its worst replica, the one
that was busy most. A batch counts when it ends.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from asyncflow.execute.messages import Worked

STATES = ("busy", "idle", "blocked")
_RECENT = 1024
"""Intervals that may still grow together: far more than a replica has batches at once."""


@dataclass(frozen=True, slots=True)
class Spent:
    """Seconds of a replica, and the rows that it finished."""

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

    def plus(self, other: "Spent", sign: int = 1) -> "Spent":
        """Add another time of the same replica, or take it away."""
        return Spent(
            self.rows + sign * other.rows,
            max(0.0, self.busy + sign * other.busy),
            max(0.0, self.idle + sign * other.idle),
            max(0.0, self.blocked + sign * other.blocked),
        )


@dataclass(frozen=True, slots=True)
class Times:
    """What every replica did."""

    stages: Mapping[str, Mapping[str, Spent]] = field(default_factory=dict)
    """By stage, and replica."""

    def worst(self, stage: str) -> tuple[str, Spent]:
        """Return the replica of a stage that was busy most."""
        return max(self.stages[stage].items(), key=lambda item: item[1].shares()["busy"])

    def rows(self, stage: str) -> int:
        """Return how many rows all replicas of a stage have finished."""
        return sum(spent.rows for spent in self.stages[stage].values())

    @property
    def bottleneck(self) -> str | None:
        """The stage whose worst replica was busy most: if it gets faster, so does the run."""
        return max(self.stages, key=lambda stage: self.worst(stage)[1].shares()["busy"], default=None)

    def per_second(self) -> dict[str, dict[str, dict[str, int]]]:
        """Return the milliseconds of each second by stage, replica and state."""
        return {
            stage: {replica: spent.per_second() for replica, spent in sorted(replicas.items())}
            for stage, replicas in self.stages.items()
        }

    def plus(self, other: "Times", sign: int = 1) -> "Times":
        """Add another time of the same run, or take it away."""
        names = dict.fromkeys((*self.stages, *other.stages))
        found = {}
        for name in names:
            mine, theirs = self.stages.get(name, {}), other.stages.get(name, {})
            replicas = dict.fromkeys((*mine, *theirs))
            found[name] = {own: mine.get(own, Spent()).plus(theirs.get(own, Spent()), sign) for own in replicas}
        return Times(found)


class Cover:
    """How much time some intervals cover that may overlap."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._begins: list[float] = []
        self._ends: list[float] = []

    def add(self, began: float, ended: float) -> None:
        """Take an interval in; those that are long over are not grown together with it."""
        begins, ends = self._begins, self._ends
        first, last = bisect_left(ends, began), bisect_right(begins, ended)
        covered = 0.0
        if first < last:
            covered = sum(ends[first:last]) - sum(begins[first:last])
            began, ended = min(began, begins[first]), max(ended, ends[last - 1])
        self.seconds += ended - began - covered
        begins[first:last], ends[first:last] = (began,), (ended,)
        if len(begins) > 2 * _RECENT:
            del begins[:-_RECENT], ends[:-_RECENT]


@dataclass(slots=True)
class _Replica:
    rows: int = 0
    occupied: Cover = field(default_factory=Cover)
    """While it had any batch."""
    working: Cover = field(default_factory=Cover)
    untold: float = 0.0
    """Seconds of waits for the queue that are too short to be told one by one."""

    def add(self, worked: Worked) -> None:
        self.rows += worked.rows
        self.occupied.add(*_ends(worked))
        told = 0.0
        for began, ended in pieces(worked):
            self.working.add(began, ended)
            told += ended - began
        self.untold += max(0.0, told - worked.busy)

    def spent(self, seconds: float) -> Spent:
        occupied = min(self.occupied.seconds, seconds)
        busy = min(occupied, max(0.0, self.working.seconds - self.untold))
        return Spent(self.rows, busy, seconds - occupied, occupied - busy)


def pieces(worked: Worked) -> Iterator[tuple[float, float]]:
    """Yield when a batch was worked on: between the waits for the queue that are told of."""
    at, end = _ends(worked)
    for began, ended in worked.waits:
        if began > at:
            yield at, min(began, end)
        at = max(at, min(ended, end))
    if end > at:
        yield at, end


def _ends(worked: Worked) -> tuple[float, float]:
    """When the rows were here, and when the batch was finished."""
    leased = worked.started + worked.idle
    return leased, leased + worked.busy + worked.blocked


@dataclass(slots=True)
class Stopwatch:
    """Counts the batches of the train table as they end."""

    _replicas: dict[str, dict[str, _Replica]] = field(default_factory=dict)
    _begun: float | None = None
    _ended: float = 0.0

    def add(self, worked: Worked) -> None:
        """Count one batch."""
        if worked.table != "train":
            return
        leased, ended = _ends(worked)
        if self._begun is None:
            self._begun = leased
        self._begun, self._ended = min(self._begun, leased), max(self._ended, ended)
        self._replicas.setdefault(worked.stage, {}).setdefault(worked.replica, _Replica()).add(worked)

    def times(self) -> Times:
        """Return what every replica did so far."""
        seconds = self._ended - (self._begun or 0.0)
        return Times(
            {
                stage: {name: own.spent(seconds) for name, own in replicas.items()}
                for stage, replicas in self._replicas.items()
            }
        )
