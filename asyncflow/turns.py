"""Engines apply new weights one after another, so that generation never stands still everywhere.

Each stages a version when it likes and then asks for its turn, which ends when it has applied it. One that takes too
long, or is gone, keeps nobody waiting: the next has its turn, and a late one applies what it was allowed to.
"""

import logging
import threading
from collections.abc import Callable

from asyncflow.execute.messages import Command, Switch
from asyncflow.types import Version

log = logging.getLogger(__name__)


class Turns:
    """Sends `Switch` to one engine at a time; safe from many threads."""

    def __init__(self, send: Callable[[str, Command], None], patience: float) -> None:
        """Wait `patience` seconds at most for an engine whose turn it is."""
        self._send, self._patience = send, patience
        self._lock = threading.Lock()
        self._waiting: dict[str, Version] = {}
        """Engines in the order of their asking, and what they have staged."""
        self._holder: str | None = None
        self._timer: threading.Timer | None = None

    def ask(self, engine: str, version: Version) -> None:
        """Hear that an engine has staged a version."""
        with self._lock:
            if engine == self._holder:
                self._send(engine, Switch(version))
                return
            self._waiting[engine] = version
            self._next()

    def over(self, engine: str) -> None:
        """Hear that an engine has applied what it staged, or will not: it waits for nothing any more."""
        with self._lock:
            self._waiting.pop(engine, None)
            if engine == self._holder:
                self._free()

    def close(self) -> None:
        """Give nobody a turn any more; idempotent."""
        with self._lock:
            self._waiting.clear()
            self._free()

    def _next(self) -> None:
        if self._holder is not None or not self._waiting:
            return
        self._holder, version = next(iter(self._waiting.items()))
        del self._waiting[self._holder]
        self._timer = threading.Timer(self._patience, lambda: self._late(timer, version))
        timer = self._timer
        timer.daemon = True
        timer.start()
        self._send(self._holder, Switch(version))

    def _free(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._holder = self._timer = None
        self._next()

    def _late(self, timer: threading.Timer, version: Version) -> None:
        with self._lock:
            if timer is self._timer:
                log.warning(
                    "%s has not applied version %d in %g s: the next engine does not wait for it",
                    self._holder,
                    version,
                    self._patience,
                )
                self._free()
