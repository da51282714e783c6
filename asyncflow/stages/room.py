"""Room in an inference engine: prompts are taken only when it has some, so that it is full and others get the rest.

Responses of a group end at different times, so a lane has slots of the engine stand idle until its longest is through:
there are more lanes than groups that fit, and those that find no room wait here, with no prompts in their hands.
"""

import threading

from asyncflow.errors import QueueClosed, WaitTimeout


class Room:
    """Where the lanes of one engine wait for room; each is a thread that gets `rows` prompts at a time."""

    def __init__(self, limit: int, rows: int, timeout: float) -> None:
        """The engine runs `limit` requests at a time; no lane waits `timeout` seconds without a response that ends."""
        self._limit, self._rows, self._timeout = limit, rows, timeout
        self._changed = threading.Condition()
        self._coming: set[int] = set()
        """Lanes that were let through, and have submitted nothing yet."""
        self._under_way = self._ended = 0
        self._closed = False

    def wait(self) -> None:
        """Return when there is room that no other lane was promised; QueueClosed after `close`."""
        lane = threading.get_ident()
        with self._changed:
            self._coming.discard(lane)
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
        with self._changed:
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
