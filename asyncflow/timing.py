"""How a lane of a stage spends its time on one batch: it waits for rows, works, and waits for the queue in between.

All times are those of CLOCK_MONOTONIC, which the processes of one host share.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from heapq import heappush, heappushpop

WAITS = 16
"""Waits for the queue that are told of one by one, the longest of a batch; all of them are in their sum."""


class Timing:
    """Measures one batch, from when its lane began to wait for it."""

    def __init__(self) -> None:
        self.started = self._leased = self._ended = time.monotonic()
        self.blocked = 0.0
        self._waits: list[tuple[float, float]] = []

    def lease(self) -> None:
        """Note that the rows are here."""
        self._leased = time.monotonic()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count what happens inside as waiting for the queue."""
        began = time.monotonic()
        try:
            yield
        finally:
            spent = time.monotonic() - began
            self.blocked += spent
            if len(self._waits) < WAITS:
                heappush(self._waits, (spent, began))
            else:
                heappushpop(self._waits, (spent, began))

    def end(self) -> None:
        """Note that the batch is answered."""
        self._ended = time.monotonic()

    @property
    def idle(self) -> float:
        """Seconds of waiting for the rows."""
        return self._leased - self.started

    @property
    def busy(self) -> float:
        """Seconds of work."""
        return max(0.0, self._ended - self._leased - self.blocked)

    @property
    def waits(self) -> tuple[tuple[float, float], ...]:
        """When the longest waits for the queue began and ended, in their order."""
        return tuple(sorted((began, began + spent) for spent, began in self._waits))
