"""Which of the ready rows a task gets next: decisions only, no sockets, clocks or threads.

Samplers hear of every change of a row's status and keep what they need to choose without looking at rows
that are not ready. `fifo` hands out rows in row order; `group` hands out whole groups in the order of their
first row, found by group id. Asked for n they give n; fewer only where

- `partial`: at least one;
- `whole`: nothing until every living row that the task has not done is ready or leased, then all in turn;
- the table is sealed and no row is blocked: nothing further can become ready, so the rest is a smaller batch.

A group is whole when each of its living rows that the task has not done is ready and not leased. So a group
that lost a member is whole without it, and one that has a member under lease, or unwritten, is not.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from asyncflow.storage.groups import Groups
from asyncflow.storage.rolling import Rolling
from asyncflow.types import Int64s

Statuses = npt.NDArray[np.uint8]

BLOCKED, READY, LEASED, DONE, GONE = range(5)
"""What a row is to a task: columns missing, free to lease, leased, acknowledged, retired or dropped."""

_NONE = np.empty(0, np.int64)


@dataclass(frozen=True, slots=True)
class Wish:
    """What a stream asks for: `rows` or `groups` of them, or all there are where both are None.

    With `ranks` these are the rows of a step, of which the stream gets the micro-batches of one `rank`.
    """

    rows: int | None = None
    groups: int | None = None
    partial: bool = False
    whole: bool = False
    rank: int = 0
    ranks: int | None = None
    split: bool = False

    @property
    def everything(self) -> bool:
        """Whether no number is named."""
        return self.rows is None and self.groups is None


class Part(Protocol):
    """A micro-batch of a step that was divided over ranks."""

    rank: int
    step: int
    number: int
    count: int

    def give_back(self) -> None:
        """Let the rank have it again."""


@dataclass(frozen=True, slots=True)
class Picked:
    """The rows of a batch, none in a micro-batch of a rank that rows did not suffice for."""

    rows: Int64s
    part: Part | None = None


class Sampler(Protocol):
    """Chooses among the ready rows of one task."""

    def admitted(self, count: int, slots: Int64s) -> None:
        """Hear of so many more rows; those that live are blocked, and in these slots."""

    def moved(self, rows: Int64s, slots: Int64s, before: Statuses, after: int) -> None:
        """Hear that distinct rows changed their status."""

    def forget(self, row: int, slot: int) -> None:
        """Hear that rows and slots below these are gone for good."""

    def pick(self, wish: Wish, short: bool) -> Picked | None:
        """Return the next batch, None if it cannot be formed; `short` allows a smaller one."""

    def accepts(self, wish: Wish) -> bool:
        """Whether this sampler can serve such a wish."""

    def kept(self, wish: Wish) -> int:
        """Return how many ready rows are kept for others than who asks."""

    def restart(self) -> None:
        """Let go of what was planned: the next batch is formed anew."""


class Order:
    """Ids waiting in ascending order, with ids that no longer count removed when they are met.

    Ids mostly come in order and are appended; late ones go to a small sorted array beside the main one, which
    is merged when it has grown to a share of it: a constant cost per id on average.
    """

    def __init__(self, base: int) -> None:
        self._main: Int64s = np.empty(64, np.int64)
        self._start = self._stop = 0
        self._late = _NONE
        self._waits = Rolling(np.bool_, base=base)

    def reach(self, stop: int) -> None:
        """Make room for ids below `stop`."""
        self._waits.grow(stop - self._waits.stop)

    def forget(self, until: int) -> None:
        """Hear that ids below `until` will never count again."""
        self._drop(until - 1)
        self._waits.forget(until)

    def push(self, ids: Int64s) -> None:
        """Add ids; those that wait already are left where they are."""
        ids = np.sort(ids[~self._waits.at(ids)])
        if len(ids) == 0:
            return
        self._waits.put(ids, 1)
        last = self._main[self._stop - 1] if self._stop > self._start else -1
        inside = int(ids.searchsorted(last))
        self._append(ids[inside:])
        if inside:
            self._late = np.sort(np.concatenate([self._late, ids[:inside]]), kind="stable")
        if len(self._late) > max(1024, (self._stop - self._start) // 8):
            self._merge()

    def _append(self, ids: Int64s) -> None:
        if self._stop + len(ids) > len(self._main):
            waiting = self._main[self._start : self._stop]
            self._main = np.empty(max(64, 2 * (len(waiting) + len(ids))), np.int64)
            self._main[: len(waiting)] = waiting
            self._start, self._stop = 0, len(waiting)
        self._main[self._stop : self._stop + len(ids)] = ids
        self._stop += len(ids)

    def _merge(self) -> None:
        ids = np.sort(np.concatenate([self._main[self._start : self._stop], self._late]), kind="stable")
        self._main, self._start, self._stop, self._late = ids, 0, len(ids), _NONE

    def take(self, count: int, valid: Rolling[np.bool_]) -> Int64s:
        """Remove and return the first `count` valid ids, or all there are."""
        look = count
        while True:
            ids = self._peek(look)
            good = ids[valid.at(ids)]
            if len(good) >= count or len(ids) < look:
                break
            look *= 2
        good = good[:count]
        if len(good):
            self._drop(int(good[-1]))
        return good

    def _peek(self, count: int) -> Int64s:
        ids = self._main[self._start : min(self._start + count, self._stop)]
        if len(self._late):
            ids = np.sort(np.concatenate([ids, self._late[:count]]), kind="stable")[:count]
        return ids

    def _drop(self, last: int) -> None:
        """Remove all ids up to `last`."""
        gone = int(self._main[self._start : self._stop].searchsorted(last, "right"))
        late = int(self._late.searchsorted(last, "right"))
        self._waits.put(self._main[self._start : self._start + gone], 0)
        self._waits.put(self._late[:late], 0)
        self._start += gone
        self._late = self._late[late:]


class Fifo:
    """Rows in row order."""

    def __init__(self, base: int) -> None:
        self._order = Order(base)
        self._ready = Rolling(np.bool_, base=base)
        self._count = 0

    def accepts(self, wish: Wish) -> bool:
        """Rows, never groups."""
        return wish.groups is None and wish.ranks is None

    def admitted(self, count: int, slots: Int64s) -> None:
        """Make room; a blocked row is of no interest."""
        self._ready.grow(count)
        self._order.reach(self._ready.stop)

    def moved(self, rows: Int64s, slots: Int64s, before: Statuses, after: int) -> None:
        """Queue what became ready."""
        self._count += (len(rows) if after == READY else 0) - int(np.count_nonzero(before == READY))
        self._ready.put(rows, after == READY)
        if after == READY:
            self._order.push(rows)

    def forget(self, row: int, slot: int) -> None:
        """Trim to the rows that are left."""
        self._order.forget(row)
        self._ready.forget(row)

    def kept(self, wish: Wish) -> int:
        """Nothing is kept."""
        return 0

    def restart(self) -> None:
        """Nothing is planned."""

    def pick(self, wish: Wish, short: bool) -> Picked | None:
        """Return the first rows that are ready."""
        count = self._count if wish.rows is None else min(wish.rows, self._count)
        if count == 0 or (wish.rows is not None and count < wish.rows and not short):
            return None
        return Picked(self._order.take(count, self._ready))


class Grouped:
    """Whole groups, in the order of their first row."""

    def __init__(self, base: int, groups: Groups) -> None:
        self._groups = groups
        self._order = Order(groups.base)
        self._open = Rolling(np.int64, base=groups.base)  # by slot: living rows that the task has not done
        self._free = Rolling(np.int64, base=groups.base)  # by slot: those of them that are ready and not leased
        self._whole = Rolling(np.bool_, base=groups.base)
        self._ready = Rolling(np.bool_, base=base)  # by row
        self._count = 0

    def accepts(self, wish: Wish) -> bool:
        """Groups, never rows."""
        return wish.rows is None and wish.ranks is None

    def admitted(self, count: int, slots: Int64s) -> None:
        """Count new rows; a whole group that gets one is whole no longer."""
        self._ready.grow(count)
        fresh = self._groups.stop - self._open.stop
        for column in (self._open, self._free, self._whole):
            column.grow(fresh)
        self._order.reach(self._groups.stop)
        self._open.add(slots, 1)
        self._judge(slots)

    def moved(self, rows: Int64s, slots: Int64s, before: Statuses, after: int) -> None:
        """Count rows that opened, closed, became ready or were taken."""
        self._open.add(slots, int(after < DONE) - (before < DONE).astype(np.int64))
        self._free.add(slots, int(after == READY) - (before == READY).astype(np.int64))
        self._ready.put(rows, after == READY)
        self._judge(slots)

    def _judge(self, slots: Int64s) -> None:
        slots = np.unique(slots)
        free = self._free.at(slots)
        whole = (free > 0) & (free == self._open.at(slots))
        self._count += int(np.count_nonzero(whole)) - int(np.count_nonzero(self._whole.at(slots)))
        self._whole.put(slots, whole)
        self._order.push(slots[whole])

    def forget(self, row: int, slot: int) -> None:
        """Trim to the rows and slots that are left."""
        self._ready.forget(row)
        self._order.forget(slot)
        for column in (self._open, self._free, self._whole):
            column.forget(slot)

    def kept(self, wish: Wish) -> int:
        """Nothing is kept."""
        return 0

    def restart(self) -> None:
        """Nothing is planned."""

    def pick(self, wish: Wish, short: bool) -> Picked | None:
        """Return the rows of the first whole groups."""
        count = self._count if wish.groups is None else min(wish.groups, self._count)
        if count == 0 or (wish.groups is not None and count < wish.groups and not short):
            return None
        rows = self._groups.members(self._order.take(count, self._whole))
        return Picked(rows[self._ready.at(rows)])
