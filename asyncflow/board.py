"""What the flow knows of its replicas, and the one place where it waits for them.

Events change the board under its lock; whoever waits names a condition over the board, a bound and, for the error,
what is missing. The first failure ends every wait with its error, a request to stop ends them with Stopped.

What replicas say may be lost with them, so nothing that the run depends on is counted from what they have said: rows
are noted by their ids, and `settle` hears from the queue which of them live.
"""

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from asyncflow.errors import AsyncflowError, ReplicaFailed, WaitTimeout
from asyncflow.execute.messages import (
    REQUEUED,
    Applied,
    Copied,
    Dropped,
    Evaluated,
    Event,
    Failed,
    Finished,
    GaveUp,
    Published,
    Ready,
    Saved,
    Scored,
    Stepped,
    Trouble,
    Worked,
)
from asyncflow.types import Version
from asyncflow.watchdog import Watchdog

_AWAY = 60.0
"""Seconds after which a wait looks again that a replica's restart has interrupted; its end is told."""

TRAINER = "trainer-0"
"""The replica that makes the steps; of several ranks, the one that speaks for all."""


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
    away: set[str] = field(default_factory=set)
    """Replicas that have failed and are being started again: no wait counts the time that this takes."""
    failed: set[str] = field(default_factory=set)
    """Replicas that have failed for good."""
    finished: set[str] = field(default_factory=set)
    published: Version = -1
    applied: dict[str, Version] = field(default_factory=dict)
    given_up: dict[str, GaveUp] = field(default_factory=dict)
    """The last version that an engine could not get."""
    times_given_up: int = 0
    steps: Counter[str] = field(default_factory=Counter)
    """Optimizer steps by table."""
    served: Counter[str] = field(default_factory=Counter)
    """Rows of the train table that each stage has finished, and not dropped."""
    logged: int = 0
    """Steps on the train table that are through: the trainer's time on them is known, too."""
    trained: int = 0
    """Rows of the train table that were trained."""
    ended: Ended = field(default_factory=Ended)
    """Groups of the train table that have ended since they were last asked for."""
    held_out: dict[int, Scored] = field(default_factory=dict)
    """Held-out responses that were scored, by row, since this was last cleared."""
    pinned: Version | None = None
    """The version that engines keep for an evaluation."""
    trouble: Trouble = field(default_factory=Trouble)
    """What scoring has met so far."""
    dropped: int = 0
    """Rows of the train table that were dropped."""
    reasons: Counter[str] = field(default_factory=Counter)
    """The same rows by reason; `untold` are those whose replica ended before it could say."""
    dropped_lengths: Counter[int] = field(default_factory=Counter)
    """How many of them had so many response tokens, of those that had a response."""
    requeued: int = 0
    """Those of them that were dropped to be generated anew."""
    lost: int = 0
    """Groups of the train table all of whose rows were dropped, but for those that are generated anew."""
    copied: set[str] = field(default_factory=set)
    """Folders of checkpoints whose state the trainer has copied, to write it."""
    saved: dict[str, Version] = field(default_factory=dict)
    failure: AsyncflowError | None = None
    stopping: bool = False
    changed: threading.Condition = field(default_factory=threading.Condition)
    watchdog: Watchdog | None = None
    _losses: dict[int, set[int]] = field(default_factory=dict)
    """Rows of the train table that were dropped, by group."""
    _rows: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """Rows of the groups under way."""

    def take(self, replica: str, event: Event) -> None:
        """Note an event and wake whoever waits for it."""
        with self.changed:
            self._note(replica, event)
            if self.watchdog is not None and not isinstance(event, Failed):
                self.watchdog.moved()
            self.changed.notify_all()

    def fall(self, replica: str) -> None:
        """Note that a replica has failed and is being started again."""
        with self.changed:
            self.ready.discard(replica)
            self.applied.pop(replica, None)
            self.away.add(replica)
            self.changed.notify_all()

    def admit(self, groups: Mapping[int, tuple[int, ...]]) -> None:
        """Note which rows were admitted for groups."""
        with self.changed:
            self._rows.update(groups)

    def under_way(self) -> tuple[int, ...]:
        """Groups that were admitted and have not ended, as far as is known."""
        with self.changed:
            return tuple(self._rows)

    def settle(self, groups: Iterable[int], living: Iterable[int]) -> None:
        """Hear which rows live of groups that were under way before these were looked for."""
        alive = set(living)
        with self.changed:
            for group in groups:
                self._lose(group, set(self._rows.get(group, ())) - alive, "")
            self.changed.notify_all()

    def fail(self, error: AsyncflowError) -> None:
        """End every wait with this error, unless another came first."""
        with self.changed:
            self.failure = self.failure or error
            self.changed.notify_all()

    def stop(self) -> None:
        """End every wait with Stopped."""
        with self.changed:
            self.stopping = True
            self.changed.notify_all()

    def wait(
        self,
        until: Callable[[], bool],
        timeout: float,
        what: Callable[[], str],
        *,
        stopping: bool = False,
        failing: bool = False,
    ) -> None:
        """Wait until a condition over the board holds; with `stopping` or `failing`, also while the run ends so.

        Raises ReplicaFailed, Stopped, or WaitTimeout with what was waited for. Time in which a replica is started
        again does not count: that has a bound of its own.
        """
        left, dog = timeout, self.watchdog
        while True:
            spent = self._sleep(until, left if dog is None else min(left, dog.pause), stopping, failing)
            if spent is None:
                return
            left -= spent
            if dog is not None:
                dog.look(what)
            if left <= 0:
                stalled = "" if dog is None else dog.stalled
                raise WaitTimeout(f"waited {timeout:g} s for {what()}{stalled}")

    def _sleep(self, until: Callable[[], bool], longest: float, stopping: bool, failing: bool) -> float | None:
        """Wait at most so long; None if the condition holds, else the seconds that count."""
        counted = 0.0
        with self.changed:
            while True:
                if self.failure is not None and not failing:
                    raise self.failure
                if self.stopping and not stopping:
                    raise Stopped("the run was asked to stop")
                if until():
                    return None
                if counted >= longest:
                    return counted
                since, counts = time.monotonic(), not self.away
                self.changed.wait(longest - counted if counts else _AWAY)
                counted += (time.monotonic() - since) * counts

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

    def wait_applied(self, version: Version, timeout: float) -> None:
        """Wait until every engine uses this version, or a newer one."""
        self.wait(
            lambda: not self.behind(version),
            timeout,
            lambda: f"version {version} to be applied by {self.late(version)}",
        )

    def late(self, version: Version) -> str:
        """Name the engines that do not use this version yet, and what has kept them from it."""
        reasons = {name: own.reason for name, own in self.given_up.items() if own.version >= version}
        return ", ".join(f"{name} ({reasons[name]})" if name in reasons else name for name in self.behind(version))

    def _note(self, replica: str, event: Event) -> None:
        match event:
            case Ready():
                self.ready.add(replica)
                self.away.discard(replica)
            case Finished():
                self.finished.add(replica)
                self.away.discard(replica)
            case Failed(report):
                self.failed.add(replica)
                self.away.discard(replica)
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
                    for group in groups:
                        self._rows.pop(group, None)
                        self._losses.pop(group, None)
                    # Rows whose lease is lost too often leave, though they may be written, and trained: then they were.
                    for group in set(groups) & set(self.ended.lost):
                        self.ended.lost.remove(group)
                        self.lost -= 1
            case Worked("train", stage, name, rows):
                self.served[stage] += rows
                if stage == "train" and name == TRAINER:
                    self.logged = self.steps["train"]
            case Evaluated(responses):
                for response in responses:  # some come again if they were not acknowledged
                    self.held_out.setdefault(response.row, response)
            case Trouble(detail, retried, replaced):
                before = self.trouble
                self.trouble = Trouble(detail or before.detail, before.retried + retried, before.replaced + replaced)
            case Copied(folder):
                self.copied.add(folder)
            case Saved(folder, version):
                self.saved[folder] = version
            case Dropped():
                self._drop(event)

    def _drop(self, event: Dropped) -> None:
        if event.table != "train":
            return
        self.served[event.stage] -= len(event.groups)
        if event.reason == REQUEUED:
            self.requeued += len(event.groups)
        lengths = dict(zip(event.rows, event.lengths, strict=False))
        by_group: dict[int, set[int]] = {}
        for group, row in zip(event.groups, event.rows, strict=True):
            by_group.setdefault(group, set()).add(row)
        for group, rows in by_group.items():
            self._lose(group, rows, event.reason, lengths)

    def _lose(self, group: int, rows: set[int], reason: str, lengths: Mapping[int, int] = MappingProxyType({})) -> None:
        """Note dropped rows of a group; those that are known to be are not counted again."""
        fresh = rows - self._losses.get(group, set())
        if not fresh:
            return
        known = self._losses.setdefault(group, set())
        known |= fresh
        self.dropped += len(fresh)
        self.reasons[reason or "untold"] += len(fresh)
        self.dropped_lengths.update(lengths[row] for row in fresh if row in lengths)
        if len(known) == self.group_size:
            self._rows.pop(group, None)
            if reason == REQUEUED:
                self.ended.requeued.append(group)
            else:
                self.lost += 1
                self.ended.lost.append(group)
