"""Lets other processes use a controller: one thread that owns a ROUTER socket.

It reads requests, hands them to the controller and sends answers as they are completed, from whatever thread;
it never waits inside a request. A message that cannot be read gets an error reply and harms nobody.

A connection is a session. When it breaks, because the process died (the kernel closes its socket at once) or
because libzmq's own heartbeats stay away, the leases of that client go back with their attempts counted.
"""

import logging
import os
import select
import socket
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import msgspec
import numpy as np
import zmq
from zmq.utils.monitor import recv_monitor_message

from asyncflow.errors import MissingDependency, StorageError, WireError
from asyncflow.storage import wire
from asyncflow.storage.address import check_port, reachable, six
from asyncflow.storage.arena import Arena, Writer
from asyncflow.storage.batch import Batch, Column
from asyncflow.storage.dock import Dock, DockMemory, whole
from asyncflow.storage.frames import MAX_FRAME, Memory
from asyncflow.storage.keys import OVERHEAD, Folder, Gate, chosen
from asyncflow.storage.memory import OwnerMemory
from asyncflow.storage.ticket import Answer, Outcome, Ticket, gathered
from asyncflow.storage.unit import Cells

log = logging.getLogger(__name__)

HEARTBEAT_MS = 5_000
SILENCE_MS = 20_000
LINGER_MS = 1_000
MAX_GRANT = 1 << 36
GATHERERS = 2
# Numbers cost half of what members of an enum do, and are asked for several times a message.
_EVENTS, _POLLIN = int(zmq.EVENTS), int(zmq.POLLIN)


@dataclass(slots=True)
class Peer:
    """A connected client: its session, its connection and the calls that wait."""

    session: int
    descriptor: int
    memory: OwnerMemory | None = None
    """Where large buffers are exchanged, if the client maps the arena."""
    bulk: bool = False
    """Whether the client reaches the port for bulk connections."""
    tickets: dict[int, Ticket] = field(default_factory=dict)


class Served(Protocol):
    """What answers the requests: a controller, or a storage unit; safe to call from any thread."""

    @property
    def placed(self) -> bool:
        """Whether cells are held by units."""

    def join(self) -> int:
        """Open a session for a client."""

    def leave(self, session: int, lost: bool) -> None:
        """End a session."""

    def submit(self, session: int, request: wire.Request, batch: Batch | None, answer: Answer) -> Ticket:
        """Answer a request now, or park it."""

    def cancel(self, ticket: Ticket) -> None:
        """End the wait of a request with an error, if it has not been answered."""


class Server:
    """Serves a controller or a unit at one address until it is closed."""

    def __init__(
        self,
        controller: Served,
        url: str,
        arena: Arena,
        writer: Writer,
        keys: Folder | None = None,
        encrypt_bulk: bool = False,
    ) -> None:
        self._controller, self._arena, self._writer = controller, arena, writer
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._gate: Gate | None = None
        self._dock: Dock | None = None
        self._events = self._socket.get_monitor_socket(zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED)
        self._wake = os.eventfd(0)
        self._outbox: deque[tuple[bytes, int, Outcome | list[wire.Buffer]]] = deque()
        # Cells are copied there, so that a large batch holds up neither this loop nor the controller.
        self._gatherers = ThreadPoolExecutor(GATHERERS, "asyncflow-gather")
        self._peers: dict[bytes, Peer] = {}
        self._connected: set[int] = set()
        self._stopping = False
        self._looping = 0
        """The thread that reads, and sends what it has queued itself."""
        self._lock = threading.Lock()
        try:
            self._guard(url, keys, encrypt_bulk)
            self.url = _bind(self._socket, url)
            if not encrypt_bulk:
                self._dock = _dock(self._socket, writer)
        except (StorageError, MissingDependency):
            self._free()
            raise
        self._thread = threading.Thread(target=self._loop, name="asyncflow-server", daemon=True)
        self._thread.start()

    def _guard(self, url: str, keys: Folder | None, encrypt_bulk: bool) -> None:
        _check(url)
        folder = chosen(url, keys)
        if encrypt_bulk and folder is None:
            raise StorageError(f"{url}: bulk data is encrypted with keys: name them by keys=FOLDER or --keys FOLDER")
        if folder is not None:
            self._gate = Gate(self._context, self._socket, folder)

    def close(self) -> None:
        """Send what is still to be sent, and leave; idempotent."""
        with self._lock:
            if not self._stopping:
                self._stopping = True
                os.eventfd_write(self._wake, 1)
        self._thread.join()

    def _loop(self) -> None:
        self._looping = threading.get_ident()
        poll = select.poll()
        descriptors = [self._socket.FD, self._events.FD, self._wake]
        if self._gate is not None:
            descriptors.append(self._gate.socket.FD)
        for descriptor in descriptors:
            poll.register(descriptor, select.POLLIN)
        self._work()  # a descriptor tells only of what comes after somebody has found nothing
        while not self._stopping:
            if self._wake in [descriptor for descriptor, _ in poll.poll()]:
                os.eventfd_read(self._wake)
            self._work()
        self._gatherers.shutdown()
        self._flush()
        if self._dock is not None:
            self._dock.close()
        self._free()

    def _work(self) -> None:
        """Read and answer until nothing is left to do: a descriptor tells of a message once, not of each."""
        while not self._stopping:
            while self._gate is not None and readable(self._gate.socket):
                self._gate.answer()
            self._watch()
            arrived = readable(self._socket)
            if arrived:
                self._receive()
            self._flush()
            if not arrived and not self._outbox and not readable(self._socket):
                return

    def _free(self) -> None:
        with self._lock:
            self._stopping = True
            os.close(self._wake)
        self._socket.disable_monitor()
        self._events.close(0)
        self._socket.close(LINGER_MS)
        if self._gate is not None:
            self._gate.close()
        self._context.term()

    def _watch(self) -> None:
        """Follow connections.

        Events come before the messages that follow them: they are read up to now before each message, so
        that a descriptor which the kernel used again is never taken for the connection that had it before.
        """
        while readable(self._events):
            event = recv_monitor_message(self._events)
            descriptor = int(event["value"])
            if event["event"] == zmq.EVENT_ACCEPTED:
                self._connected.add(descriptor)
            elif event["event"] == zmq.EVENT_DISCONNECTED:
                self._connected.discard(descriptor)
                for name in [name for name, peer in self._peers.items() if peer.descriptor == descriptor]:
                    self._leave(name, lost=True)

    def _receive(self) -> None:
        name, *parts = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
        self._watch()
        try:
            call, batch = wire.decode_call([part.buffer for part in parts], self._memory(name.bytes))
        except WireError as error:
            self._reply(name.bytes, _number(parts), error)
            return
        except Exception as error:
            # A border as below: what a client sends, or changes in memory while it is read, must not end this loop.
            log.exception("a request could not be read")
            self._reply(name.bytes, _number(parts), _fault(error))
            return
        try:
            self._handle(name.bytes, int(name.get(zmq.SRCFD)), call, batch)
        except StorageError as error:
            self._reply(name.bytes, call.call, error)
        except Exception as error:
            # A border of the process: the fault travels to the client that met it, and serves nobody else ill.
            log.exception("request %s failed", type(call.body).__name__)
            self._reply(name.bytes, call.call, _fault(error))

    def _memory(self, name: bytes) -> Memory | None:
        peer = self._peers.get(name)
        if peer is None or peer.memory is not None or self._dock is None:
            return None if peer is None else peer.memory
        # What a server that ends still has to say must come with the message.
        return DockMemory(self._dock, peer.session, fetches=peer.bulk and not self._stopping)

    def _handle(self, name: bytes, descriptor: int, call: wire.Call, batch: Batch | None) -> None:
        if isinstance(call.body, wire.Hello):
            self._welcome(name, descriptor, call)
            return
        peer = self._peers.get(name)
        if peer is None:
            raise WireError("the first message of a connection is hello")
        number = call.call
        match call.body:
            case wire.Cancel(other):
                if other in peer.tickets:
                    self._controller.cancel(peer.tickets[other])
            case wire.Map():
                self._arena.admit(peer.session)
                peer.memory = OwnerMemory(self._arena, self._writer, peer.session)
            case wire.Unpin(counts):
                self._arena.unpin(counts, peer.session)
            case wire.Grant(nbytes, left):
                self._reply(name, number, (self._grant(nbytes, left, peer), None))
            case wire.Bulk(on):
                peer.bulk = on
            case wire.Reserve() | wire.Carry() | wire.Withdraw():
                self._transfer(name, number, peer.session, call.body)
            case wire.Bye():
                self._leave(name, lost=False)
                self._reply(name, number, (wire.Ok(), None))
            case _:
                self._submit(name, peer, call, batch)

    def _grant(self, nbytes: int, left: list[int], peer: Peer) -> wire.Granted:
        if peer.memory is None or not 0 <= nbytes <= MAX_GRANT:
            raise WireError(f"no segment of {nbytes} bytes for a client that does not map the arena")
        slab = self._arena.grant(nbytes, left, peer.session)
        return wire.Granted(None if slab is None else slab.number)

    def _leave(self, name: bytes, *, lost: bool) -> None:
        session = self._peers.pop(name).session
        self._controller.leave(session, lost)
        self._arena.forget(session)
        if self._dock is not None:
            self._dock.forget(session)

    def _transfer(
        self, name: bytes, number: int, session: int, body: "wire.Reserve | wire.Carry | wire.Withdraw"
    ) -> None:
        """Do what a client wants of the dock; memory is taken or copied elsewhere, so that it holds up nobody."""
        dock = self._dock
        if dock is None:
            raise WireError("this queue has no port for bulk connections")
        match body:
            case wire.Withdraw(transfer):
                dock.withdraw(session, transfer)
            case wire.Reserve():
                self._gatherers.submit(self._answer, name, number, lambda: _reserved(dock, session, body))
            case wire.Carry(transfer):
                self._gatherers.submit(self._answer, name, number, lambda: _carried(dock, session, transfer))

    def _answer(self, name: bytes, number: int, work: Callable[[], Outcome]) -> None:
        try:
            outcome = work()
        except StorageError as error:
            outcome = error
        except Exception as error:
            # A border as in `_receive`.
            log.exception("a transfer could not be made")
            outcome = _fault(error)
        self._send(name, number, _frames(number, outcome, None))

    def _submit(self, name: bytes, peer: Peer, call: wire.Call, batch: Batch | None) -> None:
        number = call.call
        ticket = self._controller.submit(
            peer.session, call.body, batch, lambda outcome: self._reply(name, number, outcome)
        )
        peer.tickets = {key: each for key, each in peer.tickets.items() if each.open}
        if ticket.open:
            peer.tickets[number] = ticket

    def _welcome(self, name: bytes, descriptor: int, call: wire.Call) -> None:
        if isinstance(call.body, wire.Hello) and call.body.protocol != wire.PROTOCOL:
            raise WireError(f"protocol {call.body.protocol}; this queue speaks {wire.PROTOCOL}")
        # One that has died before its first message was read must not stay as a client for ever.
        if descriptor in self._connected and name not in self._peers:
            self._peers[name] = Peer(self._controller.join(), descriptor)
        self._reply(name, call.call, (self._welcomed(self._peers.get(name)), None))

    def _welcomed(self, peer: Peer | None) -> wire.Welcome:
        """Tell a client where the arena is, and what it finds there if it is the same memory."""
        challenge = None if peer is None else self._arena.challenge(peer.session)
        where = ("", 0, b"") if challenge is None else (self._arena.name, *challenge)
        return wire.Welcome(*where, self._controller.placed, 0 if self._dock is None else self._dock.port)

    def _reply(self, name: bytes, number: int, outcome: Outcome) -> None:
        """Queue an answer; called from any thread, also under the controller's lock."""
        with self._lock:
            if self._stopping:
                self._outbox.append((name, number, outcome))
            elif isinstance(outcome, tuple) and isinstance(outcome[1], Cells) and outcome[1].costly:
                self._gatherers.submit(self._gather, name, number, outcome)
            else:
                self._send(name, number, outcome)

    def _send(self, name: bytes, number: int, outcome: Outcome | list[wire.Buffer]) -> None:
        self._outbox.append((name, number, outcome))
        if threading.get_ident() != self._looping:
            os.eventfd_write(self._wake, 1)

    def _gather(self, name: bytes, number: int, outcome: Outcome) -> None:
        """Copy the cells of an answer, and queue it."""
        self._send(name, number, _frames(number, outcome, self._memory(name)))

    def _flush(self) -> None:
        while self._outbox:
            name, number, answer = self._outbox.popleft()
            frames = answer if isinstance(answer, list) else _frames(number, answer, self._memory(name))
            self._socket.send_multipart([name, *frames], copy=False)


def _reserved(dock: Dock, session: int, wish: wire.Reserve) -> Outcome:
    transfer = dock.reserve(session, wish.bytes, wish.parts)
    return (wire.Reserved() if transfer is None else wire.Reserved(transfer.number, transfer.token)), None


def _carried(dock: Dock, session: int, number: int) -> Outcome:
    transfer = dock.withdraw(session, number)
    if transfer is None or transfer.incoming:
        raise StorageError(f"transfer {number} has expired: ask for the cells again")
    data = whole(transfer)
    return wire.Ok(), Batch({"bytes": Column.ragged(data, np.array([0, data.size]), "list<uint8>")})


def _frames(number: int, outcome: Outcome, memory: Memory | None) -> list[wire.Buffer]:
    if isinstance(outcome, StorageError):
        return wire.encode_answer(number, wire.failure(outcome), None)
    try:
        return wire.encode_answer(number, outcome[0], gathered(outcome[1]), memory)
    except StorageError as error:
        return wire.encode_answer(number, wire.failure(error), None)
    except Exception as error:
        # A border as in `_receive`: nobody else would learn of it.
        log.exception("a batch could not be gathered")
        return wire.encode_answer(number, wire.failure(_fault(error)), None)


def readable(socket: "zmq.Socket[bytes]") -> bool:
    """Whether there is a message to read; after a no, and only then, the descriptor tells of the next one."""
    return bool(int(socket.get(_EVENTS)) & _POLLIN)


def _fault(error: Exception) -> StorageError:
    return StorageError(f"{type(error).__name__}: {error}")


def _number(parts: "list[zmq.Frame]") -> int:
    """Return the number of a call that could not be read, if that much of it can."""
    try:
        number = msgspec.msgpack.decode(parts[0].buffer, type=_Numbered).call if parts else -1
    except (msgspec.DecodeError, RecursionError):
        return -1
    return number if -1 <= number < 1 << 63 else -1


class _Numbered(msgspec.Struct):
    call: int


def _check(url: str) -> None:
    if not url.startswith(("ipc://", "tcp://")):
        raise StorageError(f"{url}: an address to serve at is ipc:///path or tcp://127.0.0.1:port")
    check_port(url, any_port=True)


def _bind(router: "zmq.Socket[bytes]", url: str) -> str:
    """Bind and return the address at which clients find it."""
    scheme, _, place = url.partition("://")
    if scheme == "ipc" and _taken(place):
        raise StorageError(f"{url}: another process serves there")
    router.setsockopt(zmq.IPV6, six(url))
    for option, value in OPTIONS.items():
        router.setsockopt(option, value)
    try:
        router.bind(url)
    except zmq.ZMQError as error:
        raise StorageError(f"{url}: {error}") from error
    if scheme == "ipc":
        Path(place).chmod(0o600)
    return reachable(router.getsockopt_string(zmq.LAST_ENDPOINT))


def _dock(router: "zmq.Socket[bytes]", writer: Writer) -> Dock | None:
    """Listen for bulk connections beside a socket that other hosts may reach."""
    scheme, _, place = router.getsockopt_string(zmq.LAST_ENDPOINT).partition("://")
    if scheme != "tcp":
        return None
    host = place.rpartition(":")[0].strip("[]")
    try:
        return Dock(host, writer)
    except OSError as error:
        raise StorageError(f"no port for bulk connections can be had at {host}: {error}") from error


OPTIONS = {
    zmq.LINGER: LINGER_MS,
    # Nothing is dropped at a high-water mark: what is under way is bounded by the calls that clients wait for.
    zmq.SNDHWM: 0,
    zmq.RCVHWM: 0,
    zmq.MAXMSGSIZE: MAX_FRAME + OVERHEAD,
    zmq.HEARTBEAT_IVL: HEARTBEAT_MS,
    zmq.HEARTBEAT_TIMEOUT: SILENCE_MS,
    # libzmq sends no heartbeat, and so misses none, while data is stuck in the socket: then the kernel gives up.
    zmq.TCP_MAXRT: SILENCE_MS,
}


def _taken(path: str) -> bool:
    """Whether somebody listens at a path: libzmq would silently take it over."""
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(path)
        except OSError:
            return False
    return True
