"""Which engine is told of which version of the weights, and which versions nobody needs any more.

An engine is told of one version at a time, and of the newest again when it has answered: that it uses it, or that it
gave it up. So one that stands still is sent nothing more, and one that was slow skips what is old by then. One that
comes later is told of the newest at once. While a version is held, it is the newest for all of this; what is published
meanwhile is told when it is released. A version is retired when every engine has answered for it or a newer one.
"""

import threading
from collections.abc import Callable, Sequence

from asyncflow.execute.messages import Apply, Command, Retire
from asyncflow.turns import Turns
from asyncflow.types import Version


class Delivery:
    """Sends `Apply` to engines and `Retire` to the trainer; safe from many threads."""

    def __init__(
        self, engines: Sequence[str], trainer: str, send: Callable[[str, Command], None], patience: float = 60.0
    ) -> None:
        """Where engines take turns, each has one for `patience` seconds at most."""
        self._engines, self._trainer, self._send = engines, trainer, send
        self._turns = Turns(send, patience)
        self._lock = threading.Lock()
        self._offers: dict[Version, bytes] = {}
        self._newest: Version = -1
        """The newest version that was to be used."""
        self._held = False
        """Whether engines are to keep what they were last told of."""
        self._wanted: Version = -1
        self._asked: set[str] = set()
        """Engines that have not answered."""
        self._uses: dict[str, Version] = {}
        self._settled: dict[str, Version] = {}
        """The newest version that each engine uses or has given up."""
        self._retired: Version = -1

    def published(self, version: Version, offer: bytes) -> None:
        """Hear where a version is; others may have heard of it before, and want it already."""
        with self._lock:
            self._offers[version] = offer
            if version == self._wanted:
                self._tell_all()

    def use(self, version: Version) -> None:
        """Have every engine use a version; those that use it or a newer one, or are at work on it, are left alone."""
        with self._lock:
            self._newest = max(self._newest, version)
            if not self._held:
                self._want(self._newest)

    def hold(self, version: Version) -> Version:
        """Have every engine use this version, or the newest that was told of before, and keep it; return which."""
        with self._lock:
            self._newest = max(self._newest, version)
            self._want(self._newest)
            self._held = True
            return self._wanted

    def release(self) -> None:
        """Have every engine use the newest version again, also one that came meanwhile."""
        with self._lock:
            self._held = False
            self._want(self._newest)

    def staged(self, engine: str, version: Version) -> None:
        """Hear that an engine has a version, and waits for its turn to apply it."""
        self._turns.ask(engine, version)

    def left(self, engine: str) -> None:
        """Hear that an engine is gone, for now at least."""
        self._turns.over(engine)

    def close(self) -> None:
        """Let no engine take its turn any more; idempotent."""
        self._turns.close()

    def joined(self, engine: str) -> None:
        """Hear of an engine that has just begun, and has no weights of the trainer."""
        self._turns.over(engine)
        with self._lock:
            self._asked.discard(engine)
            self._uses.pop(engine, None)
            self._settled.pop(engine, None)
            self._tell(engine)

    def answered(self, engine: str, version: Version, *, applied: bool) -> None:
        """Hear that an engine uses a version, or has given it up until it is told of another."""
        self._turns.over(engine)
        with self._lock:
            self._asked.discard(engine)
            self._settled[engine] = version
            if applied:
                self._uses[engine] = version
            if version < self._wanted:
                self._tell(engine)
            self._retire()

    def _want(self, version: Version) -> None:
        self._wanted = version
        self._offers = {other: offer for other, offer in self._offers.items() if other >= version}
        self._tell_all()

    def _tell_all(self) -> None:
        for engine in self._engines:
            self._tell(engine)

    def _tell(self, engine: str) -> None:
        if engine in self._asked or self._uses.get(engine, -1) >= self._wanted or self._wanted not in self._offers:
            return
        self._asked.add(engine)
        self._send(engine, Apply(self._wanted, self._offers[self._wanted]))

    def _retire(self) -> None:
        floor = min(self._settled.get(engine, -1) for engine in self._engines)
        if floor > self._retired:
            self._retired = floor
            self._send(self._trainer, Retire(floor))
