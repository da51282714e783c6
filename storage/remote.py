"""The link of a client in another process, which any number of threads use.

Requests are numbered and answers matched by number, so an answer is never taken for that of another request.
A connection is a session: when it breaks, every pending and later call says which peer is gone.
"""

import itertools
import os
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress

import zmq

from asyncflow.errors import QueueClosed, StorageError, WaitTimeout, WireError
from asyncflow.storage import wire
from asyncflow.storage.address import check_port
from asyncflow.storage.arena import Slab, Window, Writer
from asyncflow.storage.batch import Batch
from asyncflow.storage.connection import Connection
from asyncflow.storage.keys import Folder, chosen
from asyncflow.storage.link import GRACE, Heard, Pending
from asyncflow.storage.memory import ClientMemory
from asyncflow.storage.server import LINGER_MS, MAX_GRANT
from asyncflow.storage.ticket import Outcome


class Awaited(Pending):
    """An answer that is read from the connection by who waits for it, if nobody else reads."""

    __slots__ = ("_connection",)

    def __init__(self, connection: Connection, peer: str) -> None:
        super().__init__(peer)
        self._connection = connection

    def wait(self, timeout: float) -> bool:
        """Wait for the answer; return whether it is there."""
        if self._connection.attended:
            return super().wait(timeout)
        return self._connection.wait(self.arrived, timeout)

    def then(self, call: Callable[[], None]) -> None:
        """Have something called once the answer is there."""
        if self._outcome is None:
            self._connection.attend()
        super().then(call)


class RemoteLink:
    """A connection to a controller that is served at `url`."""

    def __init__(self, url: str, timeout: float, keys: Folder | None = None) -> None:
        check_port(url, any_port=False)
        self._keys = chosen(url, keys)
        self.url = url
        self.peer = f"the queue at {url}"
        self._numbers = itertools.count(1)
        self._pending: dict[int, Pending] = {}
        self._ended: StorageError | None = None
        self._window: Window | None = None
        self._writer = Writer(self._grant)
        self._unused: deque[int] = deque()
        self.units = False
        """Whether the cells are held by units."""
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._connection = Connection(url, self.peer, self._keys, self._receive, self._over)
        self._greet(timeout)

    def _greet(self, timeout: float) -> None:
        pending = self.send(wire.Hello())
        if not pending.wait(timeout):
            self._stop(QueueClosed("the connection was closed"))
            raise WaitTimeout(f"nobody answers at {self.url} within {timeout:g} s: is a queue served there?")
        try:
            welcome, _ = pending.result(0)
        except StorageError:
            self._stop(QueueClosed("the connection was closed"))
            raise
        self.units = isinstance(welcome, wire.Welcome) and welcome.units
        if isinstance(welcome, wire.Welcome) and Window.visible(welcome.arena, welcome.at, welcome.proof):
            self._window = Window(welcome.arena)
            self._connection.send(wire.encode_call(next(self._numbers), wire.Map(), None))

    def send(self, request: wire.Request, batch: Batch | None = None) -> Pending:
        """Send a request."""
        return self._send(Awaited(self._connection, self.peer), request, batch)

    def ask(
        self,
        request: wire.Request,
        hear: Callable[[Outcome], None],
        batch: Batch | None = None,
        *,
        lasting: bool = False,
    ) -> Pending:
        """Send a request whose answer is heard in the connection's thread, in the order in which answers come."""
        self._connection.attend()
        return self._send(Heard(self.peer, hear, lasting=lasting), request, batch)

    def _send(self, pending: Pending, request: wire.Request, batch: Batch | None) -> Pending:
        self._connection.own()
        number, window, send = next(self._numbers), self._window, self._connection.send
        if window is not None and (counts := window.unpinned()):
            send(wire.encode_call(next(self._numbers), wire.Unpin(counts), None))
        memory = None if window is None or batch is None else ClientMemory(window, self._writer)
        frames = wire.encode_call(number, request, batch, memory)
        pending.cancel = lambda: send(wire.encode_call(next(self._numbers), wire.Cancel(number), None))
        with self._lock:
            ended = self._ended
            if ended is None:
                self._pending[number] = pending
        if ended is None:
            send(frames)
        else:
            pending.complete(ended)
        return pending

    def writer(self) -> Writer:
        """Return the writer of this connection."""
        return self._writer

    def _grant(self, nbytes: int, left: list[int]) -> Slab | None:
        if self._window is None:
            return None
        while self._unused:
            left.append(self._unused.popleft())
        if nbytes > MAX_GRANT:
            self._unused.extend(left)
            return None
        pending = self.send(wire.Grant(nbytes, left))
        try:
            segment = _segment(pending.result(GRACE)[0])
            return None if segment is None else self._window.slab(segment, writable=True)
        except StorageError:
            # What is sent goes over the socket then; a segment that is there after all is left with the next grant.
            pending.then(lambda: self._leave(pending))
            return None

    def _leave(self, pending: Pending) -> None:
        with suppress(StorageError):
            segment = _segment(pending.result(0)[0])
            if segment is not None:
                self._unused.append(segment)

    @property
    def ended(self) -> StorageError | None:
        """Why the connection is over, if it is, and is attended or was read from since."""
        return self._connection.ended

    def attend(self) -> None:
        """Have a thread hear of answers, and of the end of the connection, while nobody waits for them."""
        self._connection.attend()

    def serve(self, url: str, keys: Folder | None = None) -> str:
        """Refuse: only the process that holds a queue can serve it."""
        raise StorageError(f"{self.url} is served by another process: only the one that holds a queue can serve it")

    def close(self) -> None:
        """Say goodbye, which gives back all leases, and leave; idempotent."""
        if os.getpid() != self._process:
            return
        if self._ended is None:
            self.send(wire.Bye()).wait(LINGER_MS / 1000)
        self._stop(QueueClosed(f"the client of {self.url} is closed"))

    def _stop(self, error: StorageError) -> None:
        self._connection.close(error)

    def _receive(self, parts: "list[zmq.Frame]") -> None:
        try:
            memory = None if self._window is None else ClientMemory(self._window, self._writer)
            answer, batch = wire.decode_answer([part.buffer for part in parts], memory)
        except WireError as error:
            self._connection.end(WireError(f"{self.peer} sent what is no answer: {error}"))
            return
        with self._lock:
            pending = self._pending.get(answer.call)
            if not (isinstance(pending, Heard) and pending.lasting):
                self._pending.pop(answer.call, None)
        if pending is not None:
            body = answer.body
            pending.complete(wire.raised(body) if isinstance(body, wire.Failure) else (body, batch))

    def _over(self, error: StorageError) -> None:
        """End every wait."""
        with self._lock:
            self._ended = self._ended or error
            pending, self._pending = self._pending, {}
        for each in pending.values():
            each.complete(self._ended)
        if self._window is not None:
            self._window.close()


def _segment(reply: wire.Reply) -> int | None:
    return reply.segment if isinstance(reply, wire.Granted) else None
