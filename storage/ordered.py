"""Whole groups strictly in the order of their first row: a group that is not ready holds back those after it.

So what a task gets depends on what was admitted and dropped, and never on what was finished first.
"""

import numpy as np

from asyncflow.storage.groups import Groups
from asyncflow.storage.rolling import Rolling
from asyncflow.storage.sampler import DONE, LEASED, Grouped, Picked, Statuses, Wish
from asyncflow.types import Int64s

# Groups that are looked at in one vectorised step: more than most batches have.
_LOOK = 256


class Ordered(Grouped):
    """Whole groups, none before one that was admitted earlier; groups under lease are passed over."""

    def __init__(self, base: int, groups: Groups) -> None:
        super().__init__(base, groups)
        self._leased = Rolling(np.int64, base=groups.base)  # by slot: rows under lease
        self._front = groups.base  # no group before this slot has a row that the task has not done

    def admitted(self, count: int, slots: Int64s) -> None:
        """Count new rows, for which a group before the front may be open again."""
        self._leased.grow(self._groups.stop - self._leased.stop)
        super().admitted(count, slots)
        self._reopened(slots)

    def moved(self, rows: Int64s, slots: Int64s, before: Statuses, after: int) -> None:
        """Count rows that were taken or given back."""
        self._leased.add(slots, int(after == LEASED) - (before == LEASED).astype(np.int64))
        super().moved(rows, slots, before, after)
        if after < DONE:
            self._reopened(slots)

    def _reopened(self, slots: Int64s) -> None:
        self._front = min(self._front, int(slots.min(initial=self._front)))

    def forget(self, row: int, slot: int) -> None:
        """Trim to the rows and slots that are left."""
        super().forget(row, slot)
        self._leased.forget(slot)
        self._front = max(self._front, slot)

    def pick(self, wish: Wish, short: bool) -> Picked | None:
        """Return the rows of the first groups, once all of these are whole."""
        slots = self._first(wish.groups)
        if len(slots) == 0 or (wish.groups is not None and len(slots) < wish.groups and not short):
            return None
        rows = self._groups.members(slots)
        return Picked(rows[self._ready.at(rows)])

    def _first(self, count: int | None) -> Int64s:
        """Return the first whole groups, at most `count`, up to one that is not; moves the front over what is done."""
        found: list[Int64s] = []
        start, stop, front = self._front, self._open.stop, None
        while start < stop and (count is None or sum(len(slots) for slots in found) < count):
            slots = np.arange(start, min(start + _LOOK, stop))
            undone = slots[self._open.at(slots) > 0]
            if front is None and len(undone):
                front = int(undone[0])
            waiting = undone[self._leased.at(undone) == 0]
            late = np.flatnonzero(~self._whole.at(waiting))
            found.append(waiting[: late[0]] if len(late) else waiting)
            if len(late):
                break
            start = int(slots[-1]) + 1
        self._front = stop if front is None else front
        return np.concatenate([*found, np.empty(0, np.int64)])[:count]
