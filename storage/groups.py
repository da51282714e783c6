"""Which rows belong to which group.

A group id is any int64. Each living group has a slot, a small number that grows and is never used again, so
that all else is flat arrays; the members of a slot are a chain of rows in put order. Finding the members of
n groups costs as many vectorised steps as the largest of them has rows.
"""

import numpy as np

from asyncflow.storage.image import GroupsImage
from asyncflow.storage.rolling import Rolling
from asyncflow.types import Int64s

_END = -1


class Groups:
    """Slots of groups and the chains of their rows."""

    def __init__(self, base: int = 0) -> None:
        self._slots: dict[int, int] = {}
        self._ids = Rolling(np.int64)
        self._first = Rolling(np.int64, _END)
        self._last = Rolling(np.int64, _END)
        self._living = Rolling(np.int64)
        self._next = Rolling(np.int64, _END, base)  # by row
        self._slot = Rolling(np.int64, base=base)  # by row
        self.unused = 0
        """The smallest id above all that were ever used."""

    def image(self) -> GroupsImage:
        """Return all of this as it stands."""
        columns = (self._ids, self._first, self._last, self._living, self._next, self._slot)
        return GroupsImage(self.base, self.unused, *(column.copy() for column in columns))

    def load(self, image: GroupsImage, base: int) -> None:
        """Stand as an image says, with rows from `base`."""
        self.unused = image.unused
        self._ids.load(image.ids, image.base)
        self._first.load(image.first, image.base)
        self._last.load(image.last, image.base)
        self._living.load(image.living, image.base)
        self._next.load(image.next, base)
        self._slot.load(image.slot, base)
        living = np.flatnonzero(image.living)
        self._slots = dict(zip(image.ids[living].tolist(), (image.base + living).tolist(), strict=True))

    @property
    def stop(self) -> int:
        """The slot that the next new group gets."""
        return self._ids.stop

    @property
    def base(self) -> int:
        """Every slot below this one is gone."""
        return self._ids.base

    def join(self, rows: Int64s, ids: Int64s) -> Int64s:
        """Add new rows, which follow those there are, to the groups of these ids; return their slots."""
        if len(rows) == 0:
            return rows
        fresh = int(ids[0]) >= self.unused and bool((ids[1:] > ids[:-1]).all())
        self.unused = max(self.unused, int(ids.max()) + 1)
        self._next.grow(len(rows))
        self._slot.grow(len(rows))
        if fresh:
            slots = self._begin(ids)
            self._living.put(slots, 1)
            self._first.put(slots, rows)
            self._last.put(slots, rows)
        else:
            slots = self._find(ids)
            self._living.add(slots, 1)
            self._chain(rows, slots)
        self._slot.put(rows, slots)
        return slots

    def _begin(self, ids: Int64s) -> Int64s:
        """Give slots to distinct ids that have none."""
        slots = np.arange(self.stop, self.stop + len(ids))
        for column in (self._ids, self._first, self._last, self._living):
            column.grow(len(ids))
        self._ids.put(slots, ids)
        self._slots.update(zip(ids.tolist(), slots.tolist(), strict=True))
        return slots

    def _find(self, ids: Int64s) -> Int64s:
        distinct, inverse = np.unique(ids, return_inverse=True)
        known = [self._slots.get(each, _END) for each in distinct.tolist()]
        slots = np.array(known, np.int64)
        fresh = np.flatnonzero(slots == _END)
        slots[fresh] = self._begin(distinct[fresh])
        return slots[inverse]

    def known(self, ids: Int64s) -> Int64s:
        """Return the slots of those of these ids that have a living group, each once."""
        slots = (self._slots.get(each, _END) for each in np.unique(ids).tolist())
        return np.fromiter((slot for slot in slots if slot != _END), np.int64)

    def ids(self, rows: Int64s) -> Int64s:
        """Return the group id of each row."""
        return self._ids.at(self._slot.at(rows))

    def _chain(self, rows: Int64s, slots: Int64s) -> None:
        """Append rows to the chains of their slots: link within this put, then to what was there before."""
        order = np.argsort(slots, kind="stable")
        rows, slots = rows[order], slots[order]
        same = slots[1:] == slots[:-1]
        self._next.put(rows[:-1][same], rows[1:][same])
        heads, tails = np.append(True, ~same), np.append(~same, True)
        before = self._last.at(slots[heads])
        linked = before >= self._next.base
        self._next.put(before[linked], rows[heads][linked])
        self._first.put(slots[heads][~linked], rows[heads][~linked])
        self._last.put(slots[tails], rows[tails])

    def slots(self, rows: Int64s) -> Int64s:
        """Return the slot of each row."""
        return self._slot.at(rows)

    def leave(self, rows: Int64s) -> None:
        """Take rows out of the count; a group without living rows is forgotten, and its id may start anew."""
        slots = self._slot.at(rows)
        self._living.add(slots, -1)
        over = slots[self._living.at(slots) == 0]
        for each in self._ids.at(over).tolist():
            self._slots.pop(each, None)

    def members(self, slots: Int64s) -> Int64s:
        """Return the rows of some groups, living or not: group after group, each in put order."""
        rows, places = [], []
        place, row = np.arange(len(slots)), self._first.at(slots)
        while len(row):
            here = row >= self._next.base
            row, place = row[here], place[here]
            rows.append(row)
            places.append(place)
            row = self._next.at(row)
        order = np.argsort(np.concatenate([*places, place]), kind="stable")
        return np.concatenate([*rows, row])[order]

    def forget(self, until: int) -> None:
        """Let rows below `until` go, all of them dead; chains go on with the first row that is left."""
        rows = np.arange(self._next.base, until)
        rows = rows[self._slot.at(rows) >= self.base]
        self._first.raise_to(self._slot.at(rows), self._next.at(rows))
        self._next.forget(until)
        self._slot.forget(until)
        oldest = self._living.first_other(0, self.stop)
        for column in (self._ids, self._first, self._last, self._living):
            column.forget(oldest)
