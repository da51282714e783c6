"""When an engine takes new weights: it stages a version while it generates, and applies it at a moment of its own.

- `interrupt`: after the current token.
- `drain`: when the requests that run have ended; until then none begins.
- `boundary`: when no batch of the stage is under way; until then none begins. A batch is under way from when its rows
  are here until all of them are answered: a lane that waits for rows holds nobody up, one that has new rows waits.

Where engines take turns, the moment comes only when it is this one's. Else nothing waits here for anything but
responses that run, and these end by themselves. Whoever asks for a version does not wait at all. A version that is
staged while an older one waits for its moment takes its place.
"""

import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal

from asyncflow.backends.base import InferEngine
from asyncflow.errors import QueueClosed, WaitTimeout
from asyncflow.execute.messages import Traced
from asyncflow.types import Version


class Switching:
    """Takes versions for one engine in two threads: one stages, the other waits for the moment and applies."""

    def __init__(
        self,
        engine: InferEngine,
        stage: Callable[[Version], bool],
        told: Callable[[Version], None],
        failed: Callable[[str], None],
        traced: Callable[[Traced], None] = lambda traced: None,
        *,
        when: Literal["interrupt", "drain", "boundary"] = "interrupt",
        recompute: bool = False,
        timeout: float = 3600.0,
        turn: Callable[[Version], None] | None = None,
    ) -> None:
        """Take versions for an engine.

        `stage` brings a version to it, or returns False if it could not be had; `told` hears of each version that is
        in use, `failed` why the engine refused one, `traced` how long each of this took. A batch waits `timeout`
        seconds at most. `turn`, if engines take turns, hears of each version that is staged; then `go` is called.
        """
        self._engine, self._bring, self._told, self._failed, self._traced = engine, stage, told, failed, traced
        self._when, self._recompute, self._timeout, self._turn = when, recompute, timeout, turn
        self._changed = threading.Condition()
        self._wanted = self._staged = self._allowed = self._applied = -1
        self._asked = self._ready = 0.0
        """When the wanted version was first asked for, and when the staged one was there."""
        self._asks = 0
        self._under_way = 0
        self._shut = self._closed = False
        self._threads = [
            threading.Thread(target=self._work, args=(step,), name=f"asyncflow-{name}", daemon=True)
            for name, step in (("stage", self._stage), ("apply", self._apply))
        ]
        for thread in self._threads:
            thread.start()

    def ask(self, version: Version) -> None:
        """Have the engine use this version, or a newer one that is asked for before it is loaded; return at once."""
        with self._changed:
            self._asks += 1
            if version > self._wanted:
                self._wanted, self._asked = version, time.monotonic()
            self._changed.notify_all()

    def go(self, version: Version) -> None:
        """Let the engine apply this version, since it is its turn; return at once."""
        with self._changed:
            self._allowed = max(self._allowed, version)
            self._changed.notify_all()

    @contextmanager
    def batch(self) -> Iterator[None]:
        """Mark a batch as under way; at a boundary wait until the weights are applied."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._closed or not self._shut, self._timeout):
                raise WaitTimeout(
                    f"a batch waited {self._timeout:g} s for version {self._staged}, "
                    f"which is to be applied when {self._under_way} batches that are under way have ended"
                )
            self._check_open()
            self._under_way += 1
        try:
            yield
        finally:
            with self._changed:
                self._under_way -= 1
                self._changed.notify_all()

    def close(self) -> None:
        """Wait for nothing any more; what is under way is given up. Idempotent; the engine is closed by its owner."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def join(self, timeout: float) -> None:
        """After `close`, and when the engine is closed, wait for the threads to end."""
        for thread in self._threads:
            thread.join(timeout)

    def _work(self, step: Callable[[], None]) -> None:
        try:
            while not self._closed:
                step()
        except QueueClosed:
            return  # the engine, or this, was closed
        except Exception:  # noqa: BLE001  the border of this thread: the flow hears of it
            if not self._closed:
                self._failed(f"taking version {self._wanted} of the weights\n{traceback.format_exc()}")

    def _stage(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._wanted > self._staged)
            self._check_open()
            version, asked, asks = self._wanted, self._asked, self._asks
        started = time.monotonic()
        there = self._bring(version)
        if there:
            self._trace("stage", version, started, waited_ms=1000 * (started - asked))
        with self._changed:
            if there:
                self._staged, self._ready = version, time.monotonic()
                self._allowed = version if self._turn is None else self._allowed
            elif (self._wanted, self._asks) == (version, asks):
                self._wanted = self._staged  # the engine goes on with what it has, until this is asked for again
            self._changed.notify_all()
        if there and self._turn is not None:
            self._turn(version)

    def _apply(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._applied < self._staged <= self._allowed)
            self._check_open()
            version, ready = self._staged, self._ready
        with self._moment():
            started = time.monotonic()
            self._applied = self._engine.apply_weights(version, drain=self._when == "drain", recompute=self._recompute)
            self._trace("apply", self._applied, started, waited_ms=1000 * (started - ready))
        self._told(self._applied)

    def _trace(self, what: str, version: Version, started: float, waited_ms: float) -> None:
        facts = {"version": version, "waited_ms": round(waited_ms, 3)}
        self._traced(Traced(f"weights: {what}", what, started, time.monotonic() - started, facts))

    @contextmanager
    def _moment(self) -> Iterator[None]:
        """At a boundary let no batch begin, and wait until none is under way."""
        if self._when != "boundary":
            yield
            return
        try:
            with self._changed:
                self._shut = True
                self._changed.wait_for(lambda: self._closed or not self._under_way)
                self._check_open()
            yield
        finally:
            with self._changed:
                self._shut = False
                self._changed.notify_all()

    def _check_open(self) -> None:
        if self._closed:
            raise QueueClosed("the rollout stage was closed")
