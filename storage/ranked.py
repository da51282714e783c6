"""The samplers `freshest` and `priority`: rows by a number, the highest first, ties in row order.

Ready rows stand in sorted runs, each at least twice as long as the next, so that there are few. A batch is merged
from the heads of all runs. Rows that no longer count are left where they are until they are met or their run is
merged with another: O(log n) a row on average, whatever is held.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from asyncflow.storage.rolling import Rolling
from asyncflow.storage.sampler import BLOCKED, READY, Picked, Statuses, Wish
from asyncflow.types import Float64s, Int64s


@dataclass(slots=True)
class Run:
    """Ids in the order in which they are to come, with the keys that tell it."""

    keys: Float64s
    ids: Int64s
    start: int = 0

    def __len__(self) -> int:
        return len(self.ids) - self.start

    def head(self, count: int) -> "Run":
        """Return the first that are left."""
        part = slice(self.start, self.start + count)
        return Run(self.keys[part], self.ids[part])

    def without(self, ids: Int64s) -> "Run":
        """Return those that are left but for some."""
        left = self.head(len(self))
        stay = ~np.isin(left.ids, ids)
        return Run(left.keys[stay], left.ids[stay])


class Ranked:
    """Rows by a key, the highest first."""

    def __init__(self, base: int, key: Callable[[Int64s], Float64s]) -> None:
        self._key = key
        self._ready = Rolling(np.bool_, base=base)
        self._runs: list[Run] = []
        self._count = 0

    def accepts(self, wish: Wish) -> bool:
        """Rows, never groups."""
        return wish.groups is None and wish.ranks is None

    def admitted(self, count: int, slots: Int64s) -> None:
        """Make room; a blocked row is of no interest."""
        self._ready.grow(count)

    def moved(self, rows: Int64s, slots: Int64s, before: Statuses, after: int) -> None:
        """Queue what became ready."""
        self._count += (len(rows) if after == READY else 0) - int(np.count_nonzero(before == READY))
        self._ready.put(rows, after == READY)
        if after == READY and len(rows):
            self._push(Run(-self._key(rows), rows))
        elif after == BLOCKED:  # they come again, perhaps with another key
            self._runs = [run.without(rows) for run in self._runs]

    def _push(self, run: Run) -> None:
        run = _sorted([run])
        while self._runs and len(self._runs[-1]) < 2 * len(run):
            run = _sorted([self._runs.pop(), run])
            counts = self._counts(run.ids)
            run = Run(run.keys[counts], run.ids[counts])
        self._runs.append(run)

    def _counts(self, ids: Int64s) -> "np.ndarray[tuple[int], np.dtype[np.bool_]]":
        known = ids >= self._ready.base
        known[known] = self._ready.at(ids[known])
        return known

    def forget(self, row: int, slot: int) -> None:
        """Trim to the rows that are left."""
        self._ready.forget(row)

    def kept(self, wish: Wish) -> int:
        """Nothing is kept."""
        return 0

    def restart(self) -> None:
        """Nothing is planned."""

    def pick(self, wish: Wish, short: bool) -> Picked | None:
        """Return the rows of the highest keys."""
        count = self._count if wish.rows is None else min(wish.rows, self._count)
        if count == 0 or (wish.rows is not None and count < wish.rows and not short):
            return None
        return Picked(self._take(count))

    def _take(self, count: int) -> Int64s:
        look = count
        while True:
            heads = [run.head(look) for run in self._runs]
            origin = np.repeat(np.arange(len(heads)), [len(head) for head in heads])
            ids = np.concatenate([head.ids for head in heads])
            order = np.lexsort((ids, np.concatenate([head.keys for head in heads])))[:look]
            # A row that was taken without being met here, and came back, stands here twice, side by side.
            first = np.append(True, ids[order][1:] != ids[order][:-1])
            good = np.flatnonzero(self._counts(ids[order]) & first)
            if len(good) >= count or len(order) < look:
                break
            look *= 2
        met = order[: good[count - 1] + 1]
        for run, gone in zip(self._runs, np.bincount(origin[met], minlength=len(heads)).tolist(), strict=True):
            run.start += gone
        self._runs = [run for run in self._runs if len(run)]
        return ids[order[good[:count]]]


def _sorted(runs: list[Run]) -> Run:
    keys = np.concatenate([run.keys[run.start :] for run in runs])
    ids = np.concatenate([run.ids[run.start :] for run in runs])
    order = np.lexsort((ids, keys))
    return Run(keys[order], ids[order])
