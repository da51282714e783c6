"""The sampler `token_balanced`: the rows of a step as micro-batches for R data-parallel ranks at once.

When the rows (or whole groups) of a step are there, they are divided once, by `packing`, and each rank is handed
its own micro-batches in order, so every caller of a step sees the same plan. A micro-batch that comes back goes
to its rank again and to nobody else. Rows dropped meanwhile are missing in theirs, which may leave it empty: it
is handed out all the same, since every rank of a step must take part in as many.

To `fifo` and `group`, which choose the rows of a step, rows that are planned count as leased.
"""

import heapq
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np

from asyncflow.storage import packing
from asyncflow.storage.groups import Groups
from asyncflow.storage.image import BalancedImage, Form, PartImage
from asyncflow.storage.ordered import Ordered
from asyncflow.storage.rolling import Rolling
from asyncflow.storage.sampler import LEASED, READY, Fifo, Grouped, Picked, Statuses, Wish
from asyncflow.types import Int64s


@dataclass(slots=True, order=True)
class MicroBatch:
    """One micro-batch of one rank; those of a rank are ordered."""

    step: int
    number: int
    rank: int = field(compare=False)
    count: int = field(compare=False)
    rows: Int64s = field(compare=False)
    owner: "Balanced" = field(compare=False, repr=False)
    plans: int = field(compare=False)

    def give_back(self) -> None:
        """Let the rank have it again."""
        self.owner.take_back(self)


class Balanced:
    """Micro-batches for ranks, balanced by tokens."""

    def __init__(
        self, base: int, groups: Groups, tokens: Callable[[Int64s], Int64s], budget: int, *, ordered: bool = False
    ) -> None:
        self._tokens, self._budget, self._groups = tokens, budget, groups
        self._rows, self._whole = Fifo(base), Ordered(base, groups) if ordered else Grouped(base, groups)
        self._ready = Rolling(np.bool_, base=base)
        self._planned = Rolling(np.bool_, base=base)
        self._form: Form | None = None
        self._queues: list[list[MicroBatch]] = []
        self._steps = 0
        self.plans = 0
        """How often plans were given up."""

    def accepts(self, wish: Wish) -> bool:
        """Micro-batches of a rank."""
        return wish.ranks is not None and 0 <= wish.rank < wish.ranks

    def admitted(self, count: int, slots: Int64s) -> None:
        """Make room."""
        for column in (self._ready, self._planned):
            column.grow(count)
        self._rows.admitted(count, slots)
        self._whole.admitted(count, slots)

    def moved(self, rows: Int64s, slots: Int64s, before: Statuses, after: int) -> None:
        """Note what is ready, and tell what chooses the steps of all rows that are not planned."""
        self._ready.put(rows, after == READY)
        planned = self._planned.at(rows)
        if after in (READY, LEASED):
            self._tell(rows[~planned], slots[~planned], before[~planned], after)
        else:
            self._planned.put(rows, 0)
            self._tell(rows, slots, np.where(planned, LEASED, before).astype(np.uint8), after)

    def _tell(self, rows: Int64s, slots: Int64s, before: Statuses, after: int) -> None:
        if len(rows):
            self._rows.moved(rows, slots, before, after)
            self._whole.moved(rows, slots, before, after)

    def forget(self, row: int, slot: int) -> None:
        """Trim to the rows and slots that are left."""
        for column in (self._ready, self._planned):
            column.forget(row)
        self._rows.forget(row, slot)
        self._whole.forget(row, slot)

    def pick(self, wish: Wish, short: bool) -> Picked | None:
        """Return the next micro-batch of a rank; a step is planned by the first rank that has none left."""
        form = (wish.rows, wish.groups, wish.split, wish.ranks or 1)
        if form != self._form:
            self.restart()
            self._form, self._queues = form, [[] for _ in range(form[3])]
        queue = self._queues[wish.rank]
        if not queue:
            source = self._rows if wish.groups is None else self._whole
            chosen = source.pick(Wish(wish.rows, wish.groups), short)
            if chosen is None:
                return None
            self._plan(chosen.rows, together=wish.groups is not None and not wish.split)
        part = heapq.heappop(queue)
        return Picked(self._left(part), part)

    def _plan(self, rows: Int64s, together: bool) -> None:
        """Divide the rows of a step over the ranks."""
        slots = self._groups.slots(rows)
        item = np.unique(slots, return_inverse=True)[1] if together else np.arange(len(rows))
        weights = np.bincount(item, self._tokens(rows)).astype(np.int64)
        bins, count = packing.plan(weights, len(self._queues), self._budget)
        self._tell(rows, slots, np.full(len(rows), READY, np.uint8), LEASED)
        self._planned.put(rows, 1)
        bins = bins[item]
        order = np.lexsort((rows, bins))
        ends = np.searchsorted(bins[order], np.arange(1, len(self._queues) * count))
        self._steps += 1
        for at, part in enumerate(np.split(rows[order], ends)):
            rank, number = divmod(at, count)
            batch = MicroBatch(self._steps, number, rank, count, part, self, self.plans)
            heapq.heappush(self._queues[rank], batch)

    def _left(self, part: MicroBatch) -> Int64s:
        """Return the rows of a micro-batch that are still to be had."""
        rows = part.rows[part.rows >= self._ready.base]
        return rows[self._ready.at(rows) & self._planned.at(rows)]

    def take_back(self, part: MicroBatch) -> None:
        """Queue a micro-batch again, or let its rows go if its plan was given up meanwhile."""
        if part.plans == self.plans:
            heapq.heappush(self._queues[part.rank], part)
        else:
            self._free(part)

    def claim(self, step: int, number: int, rank: int) -> MicroBatch | None:
        """Return a micro-batch that is planned, and handed out."""
        queue = self._queues[rank] if rank < len(self._queues) else []
        for part in queue:
            if (part.step, part.number) == (step, number):
                queue.remove(part)
                heapq.heapify(queue)
                return part
        return None

    def _free(self, part: MicroBatch) -> None:
        rows = self._left(part)
        self._planned.put(rows, 0)
        self._tell(rows, self._groups.slots(rows), np.full(len(rows), LEASED, np.uint8), READY)

    def restart(self) -> None:
        """Give up the plans: rows that are not under lease may go into another step."""
        self.plans += 1
        for queue in self._queues:
            for part in queue:
                self._free(part)
            queue.clear()

    def kept(self, wish: Wish) -> int:
        """Return how many ready rows are planned for other ranks."""
        if wish.ranks != len(self._queues):
            return 0
        others = (part for rank, queue in enumerate(self._queues) if rank != wish.rank for part in queue)
        return sum(len(self._left(part)) for part in others)

    def image(self, leased: Iterable[MicroBatch]) -> BalancedImage:
        """Return what is planned, with the micro-batches under lease, which nobody will be done with."""
        parts = [part for part in leased if part.plans == self.plans]
        parts += (part for queue in self._queues for part in queue)
        images = [PartImage(each.step, each.number, each.rank, each.count, self._kept(each)) for each in parts]
        return BalancedImage(self._steps, self._form, images)

    def _kept(self, part: MicroBatch) -> Int64s:
        rows = part.rows[part.rows >= self._planned.base]
        return rows[self._planned.at(rows)]

    def load(self, image: BalancedImage) -> None:
        """Plan what an image says; all rows of it are ready."""
        self._steps, self._form = image.steps, image.form
        self._queues = [[] for _ in range(image.form[3] if image.form else 0)]
        for each in image.parts:
            self._planned.put(each.rows, 1)
            slots = self._groups.slots(each.rows)
            self._tell(each.rows, slots, np.full(len(each.rows), READY, np.uint8), LEASED)
            part = MicroBatch(each.step, each.number, each.rank, each.count, each.rows, self, self.plans)
            heapq.heappush(self._queues[each.rank], part)
