"""What the flow knows of its replicas, and the one place where it waits for them.

Events change the board under its lock; whoever waits names a condition over the board, a bound and, for the error,
what is missing. The first failure ends every wait with ReplicaFailed, a request to stop ends them with Stopped.
"""

import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from asyncflow.errors import AsyncflowError, ReplicaFailed, WaitTimeout
from asyncflow.execute.messages import (
    REQUEUED,
    Applied,
    Dropped,
    Evaluated,
    Event,
    Failed,
    Finished,
    GaveUp,
    Published,
    Ready,
    Saved,
    Stepped,
    Worked,
)
from asyncflow.types import Float64s, Version


class Stopped(AsyncflowError):
    """The run was asked to stop; not a failure."""


@dataclass(slots=True)
class Ended:
    """Ids of groups by how they have ended."""

    lost: list[int] = field(default_factory=list)
    """All of their rows were dropped."""
    requeued: list[int] = field(default_factory=list)
    """The same, and they are to be generated anew."""
    trained: list[int] = field(default_factory=list)


@dataclass(slots=True)
class Board:
    """State of a run as its events tell it; read it in the condition of a `wait`."""

    replicas: tuple[str, ...]
    engines: tuple[str, ...]
    """Replicas that take weights."""
    group_size: int
    ready: set[str] = field(default_factory=set)
    finished: set[str] = field(default_factory=set)
    published: Version = -1
    applied: dict[str, Version] = field(default_factory=dict)
    given_up: dict[str, GaveUp] = field(default_factory=dict)
    """The last version that an engine could not get."""
    times_given_up: int = 0
    steps: Counter[str] = field(default_factory=Counter)
    """Optimizer steps by table."""
    served: Counter[str] = field(default_factory=Counter)
    """Rows of the train table that each stage has finished."""
    logged: int = 0
    """Steps on the train table that are through: the trainer's time on them is known, too."""
    trained: int = 0
    """Rows of the train table that were trained."""
    discarded: int = 0
    """Rows of the train table that the trainer let go."""
    ended: Ended = field(default_factory=Ended)
    """Groups of the train table that have ended since they were last asked for."""
    rewards: list[Float64s] = field(default_factory=list)
    """Held-out rewards since `rewards` was last cleared."""
    dropped: Counter[str] = field(default_factory=Counter)
    """Rows dropped by table."""
    lost: int = 0
    """Groups of the train table all of whose rows were dropped, but for those that are generated anew."""
    saved: dict[str, Version] = field(default_factory=dict)
    failure: ReplicaFailed | None = None
    stopping: bool = False
    changed: threading.Condition = field(default_factory=threading.Condition)
    _losses: Counter[int] = field(default_factory=Counter)

    def take(self, replica: str, event: Event) -> None:
        """Note an event and wake whoever waits for it."""
        with self.changed:
            self._note(replica, event)
            self.changed.notify_all()

    def stop(self) -> None:
        """End every wait with Stopped."""
        with self.changed:
            self.stopping = True
            self.changed.notify_all()

    def wait(
        self, until: Callable[[], bool], timeout: float, what: Callable[[], str], *, stopping: bool = False
    ) -> None:
        """Wait until a condition over the board holds; with `stopping`, also while the run is being stopped.

        Raises ReplicaFailed, Stopped, or WaitTimeout with what was waited for.
        """
        deadline = time.monotonic() + timeout
        with self.changed:
            while True:
                if self.failure is not None:
                    raise self.failure
                if self.stopping and not stopping:
                    raise Stopped("the run was asked to stop")
                if until():
                    return
                left = deadline - time.monotonic()
                if left <= 0:
                    raise WaitTimeout(f"waited {timeout:g} s for {what()}")
                self.changed.wait(left)

    def check(self) -> None:
        """Raise what would end a wait: ReplicaFailed or Stopped."""
        self.wait(lambda: True, 0.0, str)

    def take_ended(self) -> Ended:
        """Return the groups that have ended since this was last called."""
        with self.changed:
            ended, self.ended = self.ended, Ended()
        return ended

    def behind(self, version: Version) -> list[str]:
        """Engines that do not use this version yet."""
        return [name for name in self.engines if self.applied.get(name, -1) < version]

    def late(self, version: Version) -> str:
        """Name the engines that do not use this version yet, and what has kept them from it."""
        reasons = {name: own.reason for name, own in self.given_up.items() if own.version >= version}
        return ", ".join(f"{name} ({reasons[name]})" if name in reasons else name for name in self.behind(version))

    def _note(self, replica: str, event: Event) -> None:
        match event:
            case Ready():
                self.ready.add(replica)
            case Finished():
                self.finished.add(replica)
            case Failed(report):
                self.failure = self.failure or ReplicaFailed(replica, report)
            case Published(version):
                self.published = max(self.published, version)
            case Applied(version):
                self.applied[replica] = version
            case GaveUp():
                self.given_up[replica] = event
                self.times_given_up += 1
            case Stepped(table, _, _, groups, rows):
                self.steps[table] += 1
                if table == "train":
                    self.trained += rows
                    self.ended.trained.extend(groups)
                    # A stage beside the trainer may drop a group that is being trained: then it was trained.
                    for group in set(groups) & set(self.ended.lost):
                        self.ended.lost.remove(group)
                        self.lost -= 1
            case Worked("train", stage, _, rows):
                self.served[stage] += rows
                if stage == "train":
                    self.logged = self.steps["train"]
            case Evaluated(rewards):
                self.rewards.append(rewards)
            case Saved(folder, version):
                self.saved[folder] = version
            case Dropped():
                self._drop(event)

    def _drop(self, event: Dropped) -> None:
        self.dropped[event.table] += len(event.groups)
        if event.table != "train":
            return
        if event.stage == "train":
            self.discarded += len(event.groups)
        for group in event.groups:
            self._losses[group] += 1
            if self._losses[group] == self.group_size:
                if event.reason == REQUEUED:
                    self.ended.requeued.append(group)
                else:
                    self.lost += 1
                    self.ended.lost.append(group)
                del self._losses[group]
