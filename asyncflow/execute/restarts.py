"""Which replicas begin again when they fail, and how often in a row.

A failure that the same rows, the same code or the same configuration would meet again is final, and so is every one
of the trainer's process, which alone holds what was learned. Any other is forgiven once the replica has finished
`FORGIVEN` batches since. Rows that their replica has failed with three times leave (see `TransferQueue`'s
`max_attempts`): from the second failure in a row on a replica takes group by group, so that one leaves alone.
"""

import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from asyncflow.errors import (
    AsyncflowError,
    CheckpointError,
    ConfigError,
    DataError,
    MissingDependency,
    PipelineError,
    QueueFailed,
    RewardError,
    SchemaError,
    StalenessExceeded,
    WaitTimeout,
)
from asyncflow.pipeline import StageSpec

FORGIVEN = 10
"""Batches after which a replica that was started again counts as one that has never failed."""
CAREFUL = 2
"""Failures in a row from which on a replica takes one group at a time."""
_FINAL: tuple[type[AsyncflowError], ...] = (
    CheckpointError,
    ConfigError,
    DataError,
    MissingDependency,
    PipelineError,
    QueueFailed,
    RewardError,
    SchemaError,
    StalenessExceeded,
    WaitTimeout,
)


def final(error: BaseException) -> bool:
    """Whether a replica that begins again would meet this error again."""
    return isinstance(error, _FINAL)


def restartable(specs: Sequence[StageSpec]) -> bool:
    """Whether a replica of these stages can begin again: all but the trainer's, with what shares its process."""
    return all(spec.host != "trainer" for spec in specs)


@dataclass(slots=True)
class Restarts:
    """Counts the failures of every replica; safe to call from many threads."""

    most: int
    """Failures in a row after which a replica begins again."""
    counts: Counter[str] = field(default_factory=Counter)
    """How often each replica has begun again."""
    _failures: Counter[str] = field(default_factory=Counter)
    _batches: Counter[str] = field(default_factory=Counter)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def fail(self, replica: str) -> int:
        """Count a failure; return how many in a row these are if the replica is to begin again, else 0."""
        with self._lock:
            self._failures[replica] += 1
            self._batches[replica] = 0
            if self._failures[replica] > self.most:
                return 0
            self.counts[replica] += 1
            return self._failures[replica]

    def work(self, replica: str) -> None:
        """Count a batch that a replica has finished."""
        with self._lock:
            self._batches[replica] += 1
            if self._batches[replica] >= FORGIVEN:
                self._failures[replica] = 0
