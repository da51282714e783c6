"""Room in an inference engine: prompts are taken only when it has some, so that it is full and others get the rest.

Responses of a group end at different times, so a lane has slots of the engine stand idle until its longest is through:
there are more lanes than groups that fit, and those that find no room wait here, with no prompts in their hands.

How much room there is, the engine tells: one that for some time keeps many requests waiting, since its memory is full,
gets no more than what it runs, and then one more for each response that ends while few wait.
"""

import logging
import threading
import time
from collections.abc import Callable

from asyncflow.backends.base import Capacity
from asyncflow.errors import QueueClosed, WaitTimeout

log = logging.getLogger(__name__)
LOOK = 0.25
"""Seconds between two looks at the engine, which it may have to interrupt its work for."""
CROWDED = 1.0
"""Seconds in which many wait in the engine at every look: what was just submitted waits for a token or two."""
_MANY = 0.25
"""Share of its limit that may wait in an engine, beside a group: engines begin several requests together."""


class Room:
    """Where the lanes of one engine wait for room; each is a thread that gets `rows` prompts at a time."""

    def __init__(
        self, capacity: Callable[[], Capacity], rows: int, timeout: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Have no lane wait `timeout` seconds without a response that ends.

        `capacity` is asked now and then, by lanes whose responses have ended.
        """
        self._capacity, self._rows, self._timeout, self._clock = capacity, rows, timeout, clock
        self._most = self._limit = capacity().limit
        self._changed = threading.Condition()
        self._coming: set[int] = set()
        """Lanes that were let through, and have submitted nothing yet."""
        self._under_way = self._ended = 0
        self._closed = False
        self._asked = False
        """Whether any lane has ever asked for room."""
        self._looked = clock()
        self._crowded: float | None = None
        """Since when many have waited in the engine at every look."""
        self._ran = 0
        """The most that have run meanwhile."""

    @property
    def limit(self) -> int:
        """Requests that may be under way now, some of the last group not counted."""
        return self._limit

    def wait(self) -> None:
        """Return when there is room that no other lane was promised; QueueClosed after `close`."""
        lane = threading.get_ident()
        with self._changed:
            self._coming.discard(lane)
            self._asked = True
            while not self._closed and not self._free():
                before = self._ended
                if not self._changed.wait(self._timeout) and self._ended == before and self._under_way:
                    raise WaitTimeout(f"waited {self._timeout:g} s for one of {self._under_way} responses to end")
            if self._closed:
                raise QueueClosed("the rollout stage was closed")
            self._coming.add(lane)

    def submitted(self, count: int) -> None:
        """Hear that so many prompts of this lane go to the engine."""
        with self._changed:
            self._under_way += count
            self._coming.discard(threading.get_ident())
            self._changed.notify_all()  # they may be fewer than a whole group

    def ended(self, count: int) -> None:
        """Hear that so many responses have ended."""
        seen = self._look()
        with self._changed:
            if seen is not None:
                self._adapt(seen)
            if self._crowded is None and self._under_way >= self._limit:
                self._limit = min(self._most, self._limit + count)
            self._under_way -= count
            self._ended += count
            self._changed.notify_all()

    def close(self) -> None:
        """Let nobody wait any more; idempotent."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _free(self) -> bool:
        return self._under_way + len(self._coming) * self._rows < self._limit

    def _look(self) -> Capacity | None:
        """Ask the engine, without a lock: it may take a token's time. None if nobody needs it, or has it already."""
        now = self._clock()
        with self._changed:
            if not self._asked or now - self._looked < LOOK:
                return None
            self._looked = now
        return self._capacity()

    def _adapt(self, seen: Capacity) -> None:
        if not seen.begins or seen.waiting <= self._most * _MANY + self._rows:
            self._crowded, self._ran = None, 0
            return
        self._ran = max(self._ran, seen.running)
        if self._crowded is None:
            self._crowded = self._looked
        elif self._looked - self._crowded >= CROWDED:
            limit = max(min(self._limit, self._ran), 1)
            if limit < self._limit:
                log.info("the engine runs %d requests at a time: %d wait in it", limit, seen.waiting)
            self._limit = limit
