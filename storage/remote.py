"""The link of a client in another process, which any number of threads use.

Requests are numbered and answers matched by number, so an answer is never taken for that of another request.
A connection is a session: when it breaks, every pending and later call says which peer is gone.
"""

import itertools
import logging
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial

import numpy as np
import zmq

from asyncflow.errors import QueueClosed, StorageError, WaitTimeout, WireError
from asyncflow.storage import bulk, frames, wire
from asyncflow.storage.address import check_port, host
from asyncflow.storage.arena import Bytes, Slab, Window, Writer
from asyncflow.storage.batch import Batch
from asyncflow.storage.connection import Connection
from asyncflow.storage.ferry import Ferry, Landed, Shipped, Trip, fetchable
from asyncflow.storage.keys import Folder, chosen
from asyncflow.storage.link import GRACE, SLACK, Heard, Pending
from asyncflow.storage.memory import ClientMemory, laid
from asyncflow.storage.server import LINGER_MS, MAX_GRANT
from asyncflow.storage.ticket import Outcome

log = logging.getLogger(__name__)

# How fast the slowest of hosts makes a segment of shared memory.
_BYTES_A_SECOND = 1e8


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

    def __init__(self, url: str, timeout: float, keys: Folder | None = None, encrypt_bulk: bool = False) -> None:
        check_port(url, any_port=False)
        self._keys = chosen(url, keys)
        if encrypt_bulk and self._keys is None:
            raise StorageError(f"{url}: bulk data is encrypted with keys, which keys=FOLDER names")
        self._plain_bulk = not encrypt_bulk
        self.url = url
        self.peer = f"the queue at {url}"
        self._numbers = itertools.count(1)
        self._pending: dict[int, Pending] = {}
        self._ended: StorageError | None = None
        self._leaving: StorageError | None = None
        self._window: Window | None = None
        self._writer = Writer(self._grant)
        self._unused: deque[int] = deque()
        self._ferry: Ferry | None = None
        """What large batches go and come by, where there is no shared memory."""
        self._bulk = False
        self.units = False
        """Whether the cells are held by units."""
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
        if not isinstance(welcome, wire.Welcome):
            return
        self.units = welcome.units
        if Window.visible(welcome.arena, welcome.at, welcome.proof):
            self._window = Window(welcome.arena)
            self._tell(wire.Map())
        elif welcome.bulk and self._plain_bulk:
            self._reach(welcome.bulk)

    def _reach(self, port: int) -> None:
        try:
            self._ferry = Ferry(host(self.url), port)
        except OSError as error:
            log.warning(
                "%s: port %d, for large batches, cannot be reached (%s): they are sent over the port of the queue, "
                "which is slower. Let it through, or choose that with encrypt_bulk",
                self.peer,
                port,
                error,
            )
            return
        # What comes by it is not read from the connection by who waits for it.
        self._connection.attend()
        self._bulk = True
        self._tell(wire.Bulk(True))

    def _give_up_bulk(self, error: Exception) -> None:
        with self._lock:
            given_up, self._bulk = self._bulk, False
        if given_up and self._ended is None:
            log.warning("%s: large batches are sent over its own port from now on: %s", self.peer, str(error))
            self._tell(wire.Bulk(False))

    def _tell(self, request: wire.Request) -> None:
        """Send what is not answered."""
        self._connection.send(wire.encode_call(next(self._numbers), request, None))

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
        number, window = next(self._numbers), self._window
        if window is not None and (counts := window.unpinned()):
            self._tell(wire.Unpin(counts))
        if (
            self._bulk
            and batch is not None
            and batch.nbytes > bulk.LARGE
            and self._ship(number, pending, request, batch)
        ):
            return pending
        memory = None if window is None or batch is None else ClientMemory(window, self._writer)
        parts = wire.encode_call(number, request, batch, memory)
        pending.cancel = lambda: self._tell(wire.Cancel(number))
        if self._expect(number, pending):
            self._connection.send(parts)
        return pending

    def _expect(self, number: int, pending: Pending) -> bool:
        """Have a request answered, by the end of the connection at the latest; return whether that is to come."""
        with self._lock:
            ended = self._ended
            if ended is None:
                self._pending[number] = pending
        if ended is not None:
            pending.complete(ended)
        return ended is None

    # Large batches, where there is no shared memory

    def _ship(self, number: int, pending: Pending, request: wire.Request, batch: Batch) -> bool:
        """Send a batch ahead of its request, in another thread; return whether that was begun."""
        buffers, ferry = frames.large(batch), self._ferry
        nbytes = laid([buffer.size for buffer in buffers])[-1]
        if ferry is None or not bulk.LARGE < nbytes <= bulk.MOST:
            return False
        shipment = _Shipment(
            ferry.trip(), lambda: self._tell(wire.Cancel(number)), lambda: self._taken_back(number, nbytes)
        )
        pending.cancel = shipment.cancel
        if self._expect(number, pending):
            work = partial(self._shipping, ferry, shipment, number, request, batch)
            if not ferry.submit(partial(self._guarded, number, work)):
                self._complete(number, QueueClosed(f"the client of {self.url} is closed"))
        return True

    def _shipping(self, ferry: Ferry, shipment: "_Shipment", number: int, request: wire.Request, batch: Batch) -> None:
        buffers = frames.large(batch)
        nbytes = laid([buffer.size for buffer in buffers])[-1]
        room, memory = self._reserve(nbytes), None
        if room is not None:
            try:
                ferry.send(shipment.trip, frames.Stream(room.token, nbytes, bulk.divided(nbytes)), buffers)
                memory = Shipped(room.transfer)
            except OSError as error:
                self._tell(wire.Withdraw(room.transfer))
                if not shipment.cancelled:
                    self._give_up_bulk(error)
        shipment.go(lambda: self._connection.send(wire.encode_call(number, request, batch, memory)))

    def _reserve(self, nbytes: int) -> wire.Reserved | None:
        """Ask for room to send to; None if there is none."""
        reply = self.send(wire.Reserve(nbytes, bulk.divided(nbytes))).result(GRACE)[0]
        return reply if isinstance(reply, wire.Reserved) and reply.transfer else None

    def _taken_back(self, number: int, nbytes: int) -> None:
        self._complete(number, WaitTimeout(f"{self.peer}: {nbytes} bytes were still on their way there"))

    def _land(self, ferry: Ferry, answer: wire.Answer, parts: list[wire.Buffer]) -> None:
        """Fetch the batch of an answer."""
        layout = answer.batch
        assert layout is not None
        stream = fetchable(layout)
        try:
            memory = ferry.fetch(ferry.trip(), stream)
        except OSError as error:
            self._give_up_bulk(error)
            memory = self._carried(layout)
        batch = frames.unpack(layout, parts, Landed(memory))
        self._complete(answer.call, (answer.body, batch))

    def _carried(self, layout: frames.Layout) -> Bytes:
        """Have brought over the socket what could not be fetched."""
        batch = self.send(wire.Carry(layout.places[0][0])).result(bulk.SILENCE)[1]
        if batch is None or batch.dtypes != {"bytes": "list<uint8>"}:
            raise WireError("the answer has not the bytes that were asked for")
        return batch["bytes"].values.view(np.uint8)

    def _guarded(self, number: int, work: Callable[[], None]) -> None:
        try:
            work()
        except StorageError as error:
            self._complete(number, error)
        except Exception as error:
            # A border: nobody else would answer the one who waits.
            log.exception("a large batch could not be moved")
            self._complete(number, StorageError(f"{type(error).__name__}: {error}"))

    def _complete(self, number: int, outcome: Outcome) -> None:
        with self._lock:
            pending = self._pending.pop(number, None)
        if pending is not None:
            pending.complete(outcome)

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
        with suppress(StorageError):
            if pending.wait(min(GRACE, SLACK + nbytes / _BYTES_A_SECOND)):
                segment = _segment(pending.result(0)[0])
                return None if segment is None else self._window.slab(segment, writable=True)
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

    def serve(self, url: str, keys: Folder | None = None, encrypt_bulk: bool = False) -> str:
        """Refuse: only the process that holds a queue can serve it."""
        raise StorageError(f"{self.url} is served by another process: only the one that holds a queue can serve it")

    def close(self) -> None:
        """Say goodbye, which gives back all leases, and leave; idempotent."""
        if not self._connection.owned:
            return
        closed = QueueClosed(f"the client of {self.url} is closed")
        if self._ended is None:
            goodbye = self.send(wire.Bye())
            self._leaving = closed
            goodbye.wait(LINGER_MS / 1000)
        self._stop(closed)

    def _stop(self, error: StorageError) -> None:
        self._connection.close(error)
        if self._ferry is not None:
            self._ferry.close()

    def _receive(self, parts: "list[zmq.Frame]") -> None:
        try:
            memory = None if self._window is None else ClientMemory(self._window, self._writer)
            answer, batch = wire.decode_answer([part.buffer for part in parts], memory)
        except WireError as error:
            self._connection.end(WireError(f"{self.peer} sent what is no answer: {error}"))
            return
        if answer.batch is not None and answer.batch.stream is not None and self._ferry is not None:
            work = partial(self._land, self._ferry, answer, [part.buffer for part in parts[1:]])
            self._ferry.submit(partial(self._guarded, answer.call, work))
            return
        with self._lock:
            pending = self._pending.get(answer.call)
            if not (isinstance(pending, Heard) and pending.lasting):
                self._pending.pop(answer.call, None)
        if pending is not None:
            body = answer.body
            if isinstance(body, wire.Failure):
                # To one who has said goodbye the queue says that it does not know him.
                pending.complete(self._leaving or wire.raised(body))
            else:
                pending.complete((body, batch))

    def _over(self, error: StorageError) -> None:
        """End every wait."""
        with self._lock:
            self._ended = self._ended or error
            pending, self._pending = self._pending, {}
        for each in pending.values():
            each.complete(self._ended)
        if self._window is not None:
            self._window.close()
        if self._ferry is not None:
            self._ferry.abort()


class _Shipment:
    """A request whose batch goes ahead: until that has arrived it can be taken back here, and then at the server."""

    def __init__(self, trip: Trip, cancel: Callable[[], None], taken_back: Callable[[], None]) -> None:
        self.trip = trip
        self._lock = threading.Lock()
        self._cancel, self._taken_back = cancel, taken_back
        self._gone = self.cancelled = False

    def cancel(self) -> None:
        """Take the request back."""
        with self._lock:
            self.cancelled = True
            gone = self._gone
        if gone:
            self._cancel()
        else:
            self.trip.end()
            self._taken_back()

    def go(self, post: Callable[[], None]) -> None:
        """Send the request, unless it was taken back."""
        with self._lock:
            self._gone = not self.cancelled
            if self._gone:  # before anybody can have the server take it back
                post()


def _segment(reply: wire.Reply) -> int | None:
    return reply.segment if isinstance(reply, wire.Granted) else None
