"""How a client reaches the controller: in this process, or over a socket.

Both speak the messages of `wire`; embedded, they are passed as they are. Every call has a deadline: when it
passes the wait is cancelled, and the controller's own answer, which says what was awaited, ends it.
"""

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Protocol

from asyncflow.errors import QueueClosed, StorageError, WaitTimeout
from asyncflow.storage import wire
from asyncflow.storage.arena import Arena, Writer
from asyncflow.storage.batch import Batch
from asyncflow.storage.controller import Controller
from asyncflow.storage.memory import keep
from asyncflow.storage.ticket import Outcome, gathered

if TYPE_CHECKING:
    from asyncflow.storage.server import Server

# Seconds until what a lost unit could not answer is asked again; twice as long each time.
AGAIN = 0.02
AGAIN_AT_MOST = 1.0

# How long the answer to a cancelled request may take before the peer counts as dead.
GRACE = 10.0
# How long a peer that is well takes at most to greet, or to answer a cancelled request: for where waiting longer is
# worth nothing, since another peer will do, or what is sent again has its effect once.
SLACK = 1.0


class Pending:
    """The answer to a request, once it is there."""

    __slots__ = ("_calls", "_gate", "_outcome", "_unset", "cancel", "grace", "peer")

    def __init__(self, peer: str) -> None:
        self.peer, self.grace = peer, GRACE
        # A lock that is opened once: an Event costs ten times as much.
        self._gate = threading.Lock()
        self._gate.acquire()
        self._unset = [self._gate]
        self._outcome: Outcome | None = None
        self._calls: deque[Callable[[], None]] = deque()
        self.cancel: Callable[[], None] = _nothing

    def complete(self, outcome: Outcome) -> None:
        """Set the answer; the first one counts."""
        try:
            gate = self._unset.pop()
        except IndexError:
            return
        self._outcome = outcome
        gate.release()
        self._tell()

    def arrived(self) -> bool:
        """Whether the answer is there."""
        return self._outcome is not None

    @property
    def failed(self) -> bool:
        """Whether the answer is there, and an error."""
        return isinstance(self._outcome, StorageError)

    def then(self, call: Callable[[], None]) -> None:
        """Have something called once the answer is there, by whoever brings it: it must not block."""
        self._calls.append(call)
        if self._outcome is not None:
            self._tell()

    def _tell(self) -> None:
        # Both the one who completes and a late `then` may come here: each call is popped, and so made, once.
        while self._calls:
            with suppress(IndexError):
                self._calls.popleft()()

    def wait(self, timeout: float) -> bool:
        """Wait for the answer; return whether it is there."""
        if self._outcome is None and self._gate.acquire(timeout=min(max(timeout, 0), threading.TIMEOUT_MAX)):
            self._gate.release()
        return self._outcome is not None

    def result(self, timeout: float) -> tuple[wire.Reply, Batch | None]:
        """Wait for the answer and return it, or raise the error that it is."""
        if not self.wait(timeout):
            self.cancel()
            if not self.wait(self.grace):
                raise WaitTimeout(f"{self.peer} did not answer within {timeout:g} s")
        outcome = self._outcome
        if isinstance(outcome, StorageError):
            # A fresh one for each who waits, so that threads do not share a traceback.
            raise type(outcome)(*outcome.args)
        assert outcome is not None
        return outcome[0], gathered(outcome[1])


def _nothing() -> None:
    """Cancel what cannot be cancelled."""


def pauses(timeout: float) -> Iterator[float]:
    """Yield seconds to wait before something is tried again, twice as long each time, while there is time for it."""
    deadline, pause = time.monotonic() + timeout, AGAIN
    while time.monotonic() + pause < deadline:
        yield pause
        pause = min(2 * pause, AGAIN_AT_MOST)


class Heard(Pending):
    """A request whose answer is heard by a function, in the order in which answers come, by whoever brings it."""

    __slots__ = ("_hear", "lasting")

    def __init__(self, peer: str, hear: "Callable[[Outcome], None]", *, lasting: bool = False) -> None:
        """A `lasting` one is answered again and again, until the error that ends it."""
        super().__init__(peer)
        self._hear, self.lasting = hear, lasting

    def complete(self, outcome: Outcome) -> None:
        """Pass the answer on."""
        self._hear(outcome)


class Link(Protocol):
    """A way to the controller, shared by many threads."""

    url: str

    def send(self, request: wire.Request, batch: Batch | None = None) -> Pending:
        """Send a request; what leaves over a network is read from the memory of the batch until it is answered."""

    def serve(self, url: str, keys: "str | os.PathLike[str] | None" = None, encrypt_bulk: bool = False) -> str:
        """Let others reach this controller, and return the address."""

    def writer(self) -> Writer:
        """Return what cuts memory for cells that are written in place."""

    def close(self) -> None:
        """Leave; idempotent."""


class EmbeddedLink:
    """The controller in this process, which ends with this link."""

    def __init__(self, controller: Controller | None = None) -> None:
        self.url = "embedded://"
        self._controller = Controller() if controller is None else controller
        self._session = self._controller.join()
        self._servers: list[Server] = []
        self._arena = Arena()
        self._writer = self._arena.writer(self._session)

    def send(self, request: wire.Request, batch: Batch | None = None) -> Pending:
        """Hand the request over; cells are copied, since what is written never changes."""
        pending = Pending("the queue in this process")
        owned = None if batch is None else keep(batch, self._writer)
        ticket = self._controller.submit(self._session, request, owned, pending.complete)
        pending.cancel = partial(self._controller.cancel, ticket)
        return pending

    def serve(self, url: str, keys: "str | os.PathLike[str] | None" = None, encrypt_bulk: bool = False) -> str:
        """Let other processes in at `url`."""
        if self._controller.closed:
            raise QueueClosed(f"the queue is closed: it cannot be served at {url}")
        from asyncflow.storage.server import Server  # brings the sockets, which an embedded queue never needs

        with suppress(OSError):  # without shared memory everything crosses the socket
            self._arena.share()
        server = Server(self._controller, url, self._arena, self._writer, keys, encrypt_bulk)
        self._servers.append(server)
        return server.url

    def writer(self) -> Writer:
        """Return the writer that all puts of this process go through."""
        return self._writer

    def close(self) -> None:
        """Close the queue for all its clients."""
        self._controller.close()
        for server in self._servers:
            server.close()
        self._arena.close()
