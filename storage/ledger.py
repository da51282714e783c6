"""What became of every row: who may have it, who has it, who is done with it.

Pure: time is an argument, and nothing here waits, sends or copies cells. Rows are numbered from 0 and never
again. Everything about a row is a flat array by row; the prefix of rows that are gone is forgotten, so cost
follows the rows that live. At all times `admitted = done + dropped(by reason) + live`.

A row retires when every declared task is done with it (a durable task: and has committed the step); a row of
a table without tasks stays. Leases are fenced: what comes under an id that is over is refused (LeaseLost).
"""

import heapq
import itertools
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from asyncflow.errors import LeaseLost, RowGone, SchemaError, StorageError
from asyncflow.storage import effect, wire
from asyncflow.storage.balanced import Balanced, MicroBatch
from asyncflow.storage.effect import SILENT, Scribe
from asyncflow.storage.groups import Groups
from asyncflow.storage.image import LedgerImage, TaskImage
from asyncflow.storage.replay import Replay
from asyncflow.storage.rolling import Rolling
from asyncflow.storage.sampler import BLOCKED, DONE, GONE, LEASED, READY, Part, Picked, Sampler, Wish
from asyncflow.storage.sampling import sampler
from asyncflow.storage.spec import TaskSpec
from asyncflow.storage.traits import Traits
from asyncflow.types import Int64s

__all__ = ["Grant", "Ledger", "Task", "TaskSpec", "listed"]

_LIVE, _DEAD = 0, 1
_NONE = np.empty(0, np.int64)
_ANY = Wish()


@dataclass(slots=True)
class Grant:
    """Rows handed out to one holder until it acknowledges them or its time runs out."""

    id: int
    task: str
    rows: Int64s
    attempt: int
    expires: float
    holder: int
    since: float
    part: Part | None = None


@dataclass(slots=True)
class Task:
    """One consumer group: what each row is to it."""

    name: str
    spec: TaskSpec
    need: np.uint64
    sampler: Sampler
    status: Rolling[np.uint8]
    attempts: Rolling[np.int32]
    counts: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(5, np.int64))
    done: int = 0
    committed: int = -1
    unsettled: dict[int, list[Int64s]] = field(default_factory=dict)
    """Rows that a durable task has done but not committed, by step."""

    @property
    def replay(self) -> Replay | None:
        """The sampler, if it may hand out done rows again."""
        return self.sampler if isinstance(self.sampler, Replay) else None

    def admit(self, count: int, rows: Int64s, slots: Int64s) -> None:
        """Take in so many more rows, of which `rows` live; these are blocked."""
        for column in (self.status, self.attempts):
            column.grow(count)
        self.status.put(rows, BLOCKED)
        self.counts[BLOCKED] += len(rows)
        self.sampler.admitted(count, slots)

    def move(self, rows: Int64s, slots: Int64s, after: int) -> None:
        """Change the status of distinct rows."""
        if len(rows) == 0:
            return
        before = self.status.at(rows)
        self.counts -= np.bincount(before, minlength=5)
        self.counts[after] += len(rows)
        self.status.put(rows, after)
        self.sampler.moved(rows, slots, before, after)

    def forget(self, row: int, slot: int) -> None:
        """Trim to the rows and slots that are left."""
        for column in (self.status, self.attempts):
            column.forget(row)
        self.sampler.forget(row, slot)


class Ledger:
    """The rows of one table."""

    def __init__(self, base: int = 0, leases: Iterator[int] | None = None) -> None:
        """Start with row `base`; lease ids are drawn from `leases`, so that those of two ledgers never meet.

        What happens is told to `scribe`, before it is done wherever it can be refused.
        """
        self.scribe: Scribe = SILENT
        self.tasks: dict[str, Task] = {}
        self.groups = Groups(base)
        self.traits = Traits(base)
        self.admitted = self.done = 0
        self.dropped: dict[str, int] = {}
        self.sealed = False
        self._state = Rolling(np.uint8, base=base)
        self._written = Rolling(np.uint64, base=base)
        self._undone = Rolling(np.int32, base=base)  # tasks that have not settled the row
        self._grants: dict[int, Grant] = {}
        self._expiries: list[tuple[float, int]] = []
        self.leases = itertools.count(1) if leases is None else leases
        self._freed: list[Int64s] = []
        self._makers: tuple[str, ...] = ()
        """Tasks that write anew what was lost."""

    @property
    def live(self) -> int:
        """Rows that are neither retired nor dropped."""
        return self.admitted - self.done - sum(self.dropped.values())

    @property
    def base(self) -> int:
        """Every row below this one is gone."""
        return self._state.base

    @property
    def stop(self) -> int:
        """The row that is admitted next."""
        return self._state.stop

    # Rows

    def admit(self, count: int, groups: Int64s, written: np.uint64) -> Int64s:
        """Add rows that have the columns `written`; return their ids."""
        rows = np.arange(self._state.stop, self._state.stop + count)
        self._state.grow(count)
        self._written.grow(count)
        self._undone.grow(count)
        self._written.put(rows, int(written))
        self._undone.put(rows, sum(not task.spec.repairs for task in self.tasks.values()))
        slots = self.groups.join(rows, groups)
        self.admitted += count
        for task in self.tasks.values():
            task.admit(count, rows, slots)
            if task.spec.repairs:
                task.move(rows, slots, DONE)
            elif written & task.need == task.need:
                task.move(rows, slots, READY)
        self._collect()
        return rows

    def alive(self, rows: Int64s) -> npt.NDArray[np.bool_]:
        """Return which rows are live."""
        known = (rows >= self._state.base) & (rows < self._state.stop)
        known[known] = self._state.at(rows[known]) == _LIVE
        return known

    def find(self, groups: Int64s | None = None) -> Int64s:
        """Return the living rows of some groups, group after group and each in put order, or of all groups."""
        if groups is None:
            base = self._state.base
            return base + np.flatnonzero(self._state.span(base, self._state.stop) == _LIVE)
        rows = self.groups.members(self.groups.known(groups))
        return rows[self.alive(rows)]

    def require(self, rows: Int64s) -> None:
        """Refuse rows that are not live (RowGone)."""
        alive = self.alive(rows)
        if not alive.all():
            raise RowGone(f"{listed(rows[~alive])}: retired, dropped or never admitted")

    def written(self, rows: Int64s) -> npt.NDArray[np.uint64]:
        """Return the presence bits of living rows."""
        return self._written.at(rows)

    def write(self, rows: Int64s, columns: np.uint64) -> None:
        """Mark columns of distinct living rows as written."""
        before = self._written.at(rows)
        after = before | columns
        self._written.put(rows, after)
        for task in self.tasks.values():
            newly = (before & task.need != task.need) & (after & task.need == task.need)
            ready = rows[newly]
            task.move(ready, self.groups.slots(ready), READY)
        self._collect()

    def seal(self) -> None:
        """Hear that no row will be admitted any more."""
        self.scribe.before(effect.Sealed())
        self.sealed = True
        self._collect()

    def drop(self, rows: Int64s, reason: str) -> None:
        """Drop rows for a reason; those that are gone already stay as they are."""
        rows = np.unique(rows)
        rows = rows[self.alive(rows)]
        if len(rows):
            self.scribe.before(effect.Dropped(wire.pack(rows), reason))
            self._drop(rows, reason)

    def _drop(self, rows: Int64s, reason: str) -> None:
        if len(rows):
            self.dropped[reason] = self.dropped.get(reason, 0) + len(rows)
            self._bury(rows)
            self._collect()

    def freed(self) -> Int64s:
        """Return the rows that went since the last call."""
        rows, self._freed = self._freed, []
        return np.concatenate(rows) if rows else np.empty(0, np.int64)

    def _settle(self, rows: Int64s) -> None:
        """Note that one more task is done with living rows for good, and retire those that all are done with."""
        self._undone.put(rows, self._undone.at(rows) - 1)
        retired = rows[self._undone.at(rows) == 0]
        if len(retired):
            self.done += len(retired)
            self._bury(retired)

    def _bury(self, rows: Int64s) -> None:
        self._state.put(rows, _DEAD)
        slots = self.groups.slots(rows)
        for task in self.tasks.values():
            task.move(rows, slots, GONE)
        self.groups.leave(rows)
        self._freed.append(rows)
        self._trim()

    def _trim(self) -> None:
        """Forget the prefix of rows that are gone; each row is looked at once in its life."""
        base = self._state.first_other(_DEAD, self._state.stop)
        if base == self._state.base:
            return
        self.groups.forget(base)
        self.traits.forget(base)
        for column in (self._state, self._written, self._undone):
            column.forget(base)
        for task in self.tasks.values():
            task.forget(base, self.groups.base)

    # Tasks

    def declare(self, name: str, spec: TaskSpec, need: np.uint64) -> None:
        """Add a task, which sees the living rows there are; the same again is harmless, another is refused."""
        if name in self.tasks:
            if self.tasks[name].spec != spec:
                raise SchemaError(f"task {name!r} is declared as {self.tasks[name].spec}, not {spec}")
            return
        spec.check(name)
        self.scribe.before(effect.Declared(name, spec))
        task, live = self._begin(name, spec, need)
        if spec.repairs:
            task.move(live, self.groups.slots(live), DONE)
        else:
            ready = live[self._written.at(live) & need == need]
            task.move(ready, self.groups.slots(ready), READY)
            self._undone.put(live, self._undone.at(live) + 1)
        self.tasks[name] = task

    def _begin(self, name: str, spec: TaskSpec, need: np.uint64) -> tuple[Task, Int64s]:
        """Return a task to which all living rows are blocked, and these rows."""
        base = self._state.base
        arrays = Rolling(np.uint8, GONE, base), Rolling(np.int32, base=base)
        task = Task(name, spec, need, sampler(spec, base, self.groups, self.traits), *arrays)
        rows = np.arange(base, self._state.stop)
        live = rows[self._state.at(rows) == _LIVE]
        task.admit(len(rows), live, self.groups.slots(live))
        return task, live

    def task(self, name: str) -> Task:
        """Return a declared task; any other name is a SchemaError."""
        if name not in self.tasks:
            raise SchemaError(f"no task {name!r}; declared: {', '.join(self.tasks) or 'none'}")
        return self.tasks[name]

    def blocked(self, name: str) -> Int64s:
        """Return the rows that lack columns which a task reads; looks at all rows, so for messages only."""
        status = self.task(name).status
        return status.base + np.flatnonzero(status.span(status.base, status.stop) == BLOCKED)

    # Leases

    def lease(self, name: str, wish: Wish, now: float, holder: int) -> Grant | None:
        """Hand out the next batch of a task to a holder; None if it cannot be formed now."""
        self.scribe.ready()
        task = self.task(name)
        complete = task.counts[BLOCKED] == 0
        if wish.whole and not complete:
            return None
        plans = task.sampler.plans if isinstance(task.sampler, Balanced) else 0
        picked = task.sampler.pick(wish, short=wish.partial or wish.whole or (self.sealed and bool(complete)))
        if picked is None:
            if isinstance(task.sampler, Balanced) and task.sampler.plans != plans:
                self.scribe.after(effect.Leased(name, wish, 0, b""))
            return None
        grant = self._grant(task, picked, now, holder)
        try:
            self.scribe.after(effect.Leased(name, wish, grant.id, wire.pack(grant.rows)))
        except StorageError:
            self._return(grant, counted=False)
            raise
        return grant

    def _grant(self, task: Task, picked: Picked, now: float, holder: int) -> Grant:
        lease, rows = next(self.leases), picked.rows
        task.move(rows, self.groups.slots(rows), LEASED)
        task.attempts.put(rows, task.attempts.at(rows) + 1)
        attempt = int(task.attempts.at(rows).max(initial=1))
        grant = Grant(lease, task.name, rows, attempt, now + task.spec.lease_seconds, holder, now, picked.part)
        self._grants[grant.id] = grant
        heapq.heappush(self._expiries, (grant.expires, grant.id))
        return grant

    def exhausted(self, name: str, holder: int, wish: Wish = _ANY) -> bool:
        """Whether nothing can come for this holder any more.

        The table is sealed, no row of the task is ready or blocked, and no other holder has rows that might
        come back. Leases of the holder itself do not count: it would wait for itself. What is planned for, or
        leased by, another rank comes back to that rank only, and does not count either.
        """
        task = self.task(name)
        if task.spec.repairs and self.live:
            return False
        if not self.sealed or task.counts[BLOCKED] or task.counts[READY] > task.sampler.kept(wish):
            return False
        others = (grant for grant in self._grants.values() if grant.task == name and grant.holder != holder)
        return not any(self._may_return(grant, wish) for grant in others)

    def _may_return(self, grant: Grant, wish: Wish) -> bool:
        """Whether what a lease holds could be handed out to who asks."""
        if grant.part is not None:
            return grant.part.rank == wish.rank
        return len(self._held(grant)) > 0

    def grant(self, lease: int, now: float) -> Grant:
        """Return a lease that is in force; any other is refused (LeaseLost)."""
        grant = self._grants.get(lease)
        if grant is None or grant.expires <= now:
            raise LeaseLost(f"lease {lease} has expired, was given back, or is done")
        return grant

    @property
    def outstanding(self) -> Container[int]:
        """The ids of the leases that are not over."""
        return self._grants.keys()

    def oldest_lease(self, name: str) -> float | None:
        """Return when the oldest lease of a task was given."""
        return min((grant.since for grant in self._grants.values() if grant.task == name), default=None)

    def held(self) -> list[tuple[Grant, Int64s]]:
        """Return the leases in force, the oldest first, each with the rows that still are under it."""
        return [(grant, self._held(grant)) for grant in self._grants.values()]

    def _held(self, grant: Grant) -> Int64s:
        """Return the rows of a lease that still are under it: some may have been dropped, and no
        row comes under another lease before this one has ended."""
        return grant.rows[self.alive(grant.rows)]

    def covers(self, lease: int, rows: Int64s, now: float) -> None:
        """Refuse rows that are not under a lease in force (LeaseLost)."""
        outside = rows[~np.isin(rows, self.grant(lease, now).rows)]
        if len(outside):
            raise LeaseLost(f"lease {lease} does not hold {listed(outside)}")

    def finish(self, lease: int, now: float, step: int | None = None) -> None:
        """Acknowledge a lease; a durable task names the step that used the rows."""
        grant = self.grant(lease, now)
        task, rows = self.tasks[grant.task], self._held(grant)
        if task.spec.durable and step is None:
            raise SchemaError(f"task {task.name!r} is durable: done needs the step that used the rows")
        self.scribe.before(effect.Finished(lease, step))
        del self._grants[grant.id]
        later = step is not None and task.spec.durable and step > task.committed
        if not later and task.replay is None and (self._undone.at(rows) == 1).all():
            task.done += len(rows)  # nobody else wants them: they need not be done before they are gone
            self._settle(rows)
            return
        task.move(rows, self.groups.slots(rows), DONE)
        if later and step is not None:
            task.unsettled.setdefault(step, []).append(rows)
        if task.replay is not None:
            task.attempts.put(rows, 0)
            task.done += task.replay.used(rows, step if later and step is not None else task.committed)
            self._collect()
            return
        task.done += len(rows)
        if not later:
            self._settle(rows)

    def _collect(self) -> None:
        """Settle the rows that replaying tasks are over with; those of a step that is not committed wait for it."""
        for task in self.tasks.values():
            if task.replay is None:
                continue
            if self.sealed and not task.counts[:DONE].any():
                task.replay.end()
            rows = task.replay.over()
            rows = rows[self.alive(rows)]
            self._settle(rows[task.replay.over_by(rows, task.status.at(rows), task.committed)])

    def extend(self, lease: int, seconds: float, now: float) -> None:
        """Let a lease in force run until `seconds` from now."""
        grant = self.grant(lease, now)
        if not 0 < seconds < float("inf"):
            raise SchemaError(f"a lease is extended by some seconds, not {seconds}")
        grant.expires = now + seconds
        heapq.heappush(self._expiries, (grant.expires, lease))

    def release(self, lease: int, now: float, counted: bool = False) -> None:
        """Give a lease back; its attempt counts only if asked."""
        grant = self.grant(lease, now)
        self.scribe.before(effect.Returned(lease, counted))
        self._give_back(grant, counted)

    def abandon(self, holder: int, counted: bool) -> None:
        """Give back all leases of a holder."""
        for grant in [grant for grant in self._grants.values() if grant.holder == holder]:
            self._return(grant, counted)

    def expire(self, now: float) -> bool:
        """Take back every lease whose time is up, attempt counted; return whether there were any."""
        some = False
        while self._expiries and self._expiries[0][0] <= now:
            grant = self._grants.get(heapq.heappop(self._expiries)[1])
            # An extended lease has a later entry of its own.
            if grant is not None and grant.expires <= now:
                self._return(grant, counted=True)
                some = True
        return some

    def next_expiry(self) -> float | None:
        """Return when the next lease may expire."""
        while self._expiries and self._expiries[0][1] not in self._grants:
            heapq.heappop(self._expiries)
        return self._expiries[0][0] if self._expiries else None

    def _return(self, grant: Grant, counted: bool) -> None:
        """Give a lease back, whether that can be recorded now or later."""
        self._give_back(grant, counted)
        with suppress(StorageError):
            self.scribe.after(effect.Returned(grant.id, counted))

    def _give_back(self, grant: Grant, counted: bool) -> None:
        task, rows = self.tasks[grant.task], self._held(grant)
        del self._grants[grant.id]
        if not counted:
            task.attempts.put(rows, task.attempts.at(rows) - 1)
        spent = task.attempts.at(rows) >= task.spec.max_attempts
        task.move(rows[~spent], self.groups.slots(rows[~spent]), READY)
        self._drop(rows[spent], f"max_attempts:{task.name}")
        if grant.part is not None:
            grant.part.give_back()

    # Durable tasks

    def commit(self, name: str, step: int) -> None:
        """Let rows go that a durable task has done with a step up to this one."""
        task = self._durable(name)
        self.scribe.before(effect.Committed(name, step))
        task.committed = max(task.committed, step)
        for key in sorted(key for key in task.unsettled if key <= step):
            rows = self._living(task.unsettled.pop(key))
            if task.replay is not None:
                # A row that is used again later, or may be, goes with its last use.
                rows = np.unique(rows)
                rows = rows[task.replay.over_by(rows, task.status.at(rows), key)]
            self._settle(rows)

    def rewind(self, name: str, step: int) -> None:
        """Make every row ready again that a durable task has done with a later step."""
        task = self._durable(name)
        if step < task.committed:
            raise RowGone(f"task {name!r} has committed step {task.committed}: it cannot go back to step {step}")
        self.scribe.before(effect.Rewound(name, step))
        later = [part for key in list(task.unsettled) if key > step for part in task.unsettled.pop(key)]
        rows = self._living([*later, _NONE])
        task.done -= len(rows) if task.replay is None else task.replay.unused(rows)
        task.sampler.restart()
        # A row that is replayed at this moment is under lease: it stays there.
        rows = np.unique(rows[task.status.at(rows) == DONE])
        task.attempts.put(rows, 0)
        self._reopen(task, rows)

    def _reopen(self, task: Task, rows: Int64s) -> None:
        """Make rows ready again, but for those that have lost cells: these come when they are written anew."""
        self._redo(rows[~self._open_again(task, rows)])

    def _open_again(self, task: Task, rows: Int64s) -> npt.NDArray[np.bool_]:
        """Make rows ready, or blocked where they lack columns; return which are ready."""
        has: npt.NDArray[np.bool_] = self._written.at(rows) & task.need == task.need
        for some, after in ((rows[has], READY), (rows[~has], BLOCKED)):
            task.move(some, self.groups.slots(some), after)
        return has

    def lose(self, rows: Int64s, kept: npt.NDArray[np.uint64], again: Sequence[str]) -> None:
        """Hear that of living rows only the columns `kept` are left.

        Those that somebody still needs are made anew by the tasks `again`, which get them once more.
        """
        self._makers = tuple(dict.fromkeys([*self._makers, *(name for name in again if name in self.tasks)]))
        left = self._written.at(rows) & kept
        self._written.put(rows, left)
        wanted = np.zeros(len(rows), np.bool_)
        for task in self.tasks.values():
            lacking = (left & task.need != task.need) & (task.status.at(rows) < DONE)
            if lacking.any():
                self._revoke(task, rows[lacking])
                task.sampler.restart()
                task.move(rows[lacking], self.groups.slots(rows[lacking]), BLOCKED)
            wanted |= lacking
        self._redo(rows[wanted])

    def _redo(self, rows: Int64s) -> None:
        """Have rows without cells made anew by the tasks that have done so before."""
        for name in self._makers:
            task = self.tasks[name]
            done = rows[task.status.at(rows) == DONE]
            settled = done[~np.isin(done, self._open(task))]
            self._undone.put(settled, self._undone.at(settled) + 1)
            for step, parts in task.unsettled.items():
                task.unsettled[step] = [part[~np.isin(part, done)] for part in parts]
            if not task.spec.repairs:
                task.done -= len(done) if task.replay is None else task.replay.anew(done)
            task.attempts.put(done, 0)
            self._open_again(task, done)

    def _revoke(self, task: Task, rows: Int64s) -> None:
        """Take rows out of the leases of a task."""
        for grant in self._grants.values():
            if grant.task == task.name:
                grant.rows = grant.rows[~np.isin(grant.rows, rows)]
                if isinstance(grant.part, MicroBatch):
                    grant.part.rows = grant.part.rows[~np.isin(grant.part.rows, rows)]

    def reset(self, name: str) -> None:
        """Make all living rows ready again that a task has done or leased; its leases are over."""
        task = self.task(name)
        self.scribe.before(effect.Reset(name))
        grants = [grant for grant in self._grants.values() if grant.task == name]
        for grant in grants:
            del self._grants[grant.id]
        task.sampler.restart()
        status = task.status.span(task.status.base, task.status.stop)
        rows = task.status.base + np.flatnonzero((status == DONE) | (status == LEASED))
        done = rows[task.status.at(rows) == DONE]
        settled = done[~np.isin(done, self._open(task))]
        self._undone.put(settled, self._undone.at(settled) + 1)
        task.done -= len(done) if task.replay is None else task.replay.anew(rows)
        task.committed = -1
        task.unsettled.clear()
        task.attempts.put(rows, 0)
        self._reopen(task, rows)
        for grant in grants:
            if grant.part is not None:
                grant.part.give_back()

    def _open(self, task: Task) -> Int64s:
        """Return the done rows that a task has not settled."""
        again = _NONE if task.replay is None else task.replay.again
        return self._living([again, *(part for parts in task.unsettled.values() for part in parts)])

    def _durable(self, name: str) -> Task:
        task = self.task(name)
        if not task.spec.durable:
            raise SchemaError(f"task {name!r} is not durable: it has nothing to commit or rewind")
        return task

    def _living(self, parts: Sequence[Int64s]) -> Int64s:
        rows = np.concatenate(parts)
        return rows[self.alive(rows)]

    # What a journal makes again

    def kept(self) -> Iterator[effect.Kept]:
        """Return the leases in force, for who knows all else from an image."""
        for grant in self._grants.values():
            part = grant.part
            sampler = self.tasks[grant.task].sampler
            planned = isinstance(part, MicroBatch) and isinstance(sampler, Balanced) and part.plans == sampler.plans
            place = (part.step, part.number, part.rank) if planned and part is not None else None
            yield effect.Kept(grant.task, grant.id, wire.pack(self._held(grant)), grant.attempt, place)

    def keep(self, kept: effect.Kept) -> None:
        """Have rows that are ready under a lease which was given before, and counted; nothing if it is known."""
        if kept.lease in self._grants:
            return
        task, rows = self.task(kept.task), wire.unpack(kept.rows)
        self.require(rows)
        part = None
        if kept.part is not None and isinstance(task.sampler, Balanced):
            part = task.sampler.claim(*kept.part)
        task.move(rows, self.groups.slots(rows), LEASED)
        self._grants[kept.lease] = Grant(kept.lease, task.name, rows, kept.attempt, np.inf, 0, 0.0, part)

    def relet(self, leased: effect.Leased) -> bool:
        """Give a lease again that was given before; return whether the sampler chose the same rows."""
        rows = wire.unpack(leased.rows)
        grant = self.lease(leased.task, leased.wish, 0.0, 0)
        if grant is None and leased.lease == 0:
            return True
        if grant is not None and leased.lease and np.array_equal(grant.rows, rows):
            return True
        if grant is not None:
            self._give_back(grant, counted=False)
        if leased.lease == 0:
            return False
        attempts = self.task(leased.task).attempts
        self.require(rows)
        attempts.put(rows, attempts.at(rows) + 1)
        self.keep(effect.Kept(leased.task, leased.lease, leased.rows, int(attempts.at(rows).max(initial=1)), None))
        return False

    def recall(self) -> None:
        """End all leases, since their holders are gone: attempts count, but nothing is dropped for it."""
        for grant in list(self._grants.values()):
            task, rows = self.tasks[grant.task], self._held(grant)
            del self._grants[grant.id]
            task.move(rows, self.groups.slots(rows), READY)
            if grant.part is not None:
                grant.part.give_back()

    # Snapshots

    def image(self) -> LedgerImage:
        """Return all of this as it stands; leases are not part of it, but their attempts are."""
        return LedgerImage(
            self.base,
            self.admitted,
            self.done,
            dict(self.dropped),
            self.sealed,
            self._state.copy(),
            self._written.copy(),
            self._undone.copy(),
            self.groups.image(),
            self.traits.image(),
            [self._picture(task) for task in self.tasks.values()],
        )

    def _picture(self, task: Task) -> TaskImage:
        unsettled = {int(step): np.concatenate(rows) for step, rows in task.unsettled.items()}
        arrays = task.status.copy(), task.attempts.copy()
        image = TaskImage(task.name, task.spec, *arrays, task.done, task.committed, unsettled)
        if isinstance(task.sampler, Balanced):
            held = (grant.part for grant in self._grants.values() if grant.task == task.name)
            image.balanced = task.sampler.image(part for part in held if isinstance(part, MicroBatch))
        image.replay = None if task.replay is None else task.replay.image()
        return image

    def load(self, image: LedgerImage, needs: Mapping[str, np.uint64]) -> None:
        """Stand as an image says, with no lease; `needs` are the columns that each task reads."""
        self.admitted, self.done = image.admitted, image.done
        self.dropped, self.sealed = dict(image.dropped), image.sealed
        self._state.load(image.state, image.base)
        self._written.load(image.written, image.base)
        self._undone.load(image.undone, image.base)
        self.groups.load(image.groups, image.base)
        self.traits.load(image.traits, image.base, self.stop)
        for task in image.tasks:
            self.tasks[task.name] = self._revived(task, needs[task.name])

    def _revived(self, image: TaskImage, need: np.uint64) -> Task:
        """Return a task as an image says; what was leased is ready again."""
        task, live = self._begin(image.name, image.spec, need)
        status = image.status[live - self.base]
        for rows, after in ((live[(status == READY) | (status == LEASED)], READY), (live[status == DONE], DONE)):
            task.move(rows, self.groups.slots(rows), after)
        task.attempts.put(live, image.attempts[live - self.base])
        task.done, task.committed = image.done, image.committed
        task.unsettled = {step: [rows] for step, rows in image.unsettled.items()}
        if isinstance(task.sampler, Balanced) and image.balanced is not None:
            task.sampler.load(image.balanced)
        if task.replay is not None and image.replay is not None:
            task.replay.load(image.replay)
        return task


def listed(rows: Int64s, most: int = 8) -> str:
    """Name rows for a message, the first few of many."""
    names = ", ".join(map(str, rows[:most].tolist()))
    return f"row{'s' if len(rows) != 1 else ''} {names}" + (f" and {len(rows) - most} more" if len(rows) > most else "")
