"""The server's end of bulk connections: what is to be fetched, what room was promised, and who may come for it.

One thread accepts connections and reads their headers; a connection that names a part of a transfer is handed to a
worker, and comes back when the part has crossed. A stranger is a connection that has not named one yet: their number
is bounded, the oldest goes first, and none stays long.

A transfer belongs to the session that asked for it. It ends with the session, once it is used, or when the session
has moved nothing for a while. Memory that bytes are received into is held by the worker that receives them, so it is
not used again before that has ended.
"""

import logging
import os
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field

import numpy as np

from asyncflow.errors import WireError
from asyncflow.storage import bulk
from asyncflow.storage.arena import ALIGN, Arena, Bytes, Writer
from asyncflow.storage.bulk import HEADER, MAGIC, NO, YES
from asyncflow.storage.frames import Stream
from asyncflow.storage.memory import laid

log = logging.getLogger(__name__)

GREETING = 5.0
"""Seconds that a stranger has to name a transfer."""
IDLE = 60.0
"""Seconds that a connection is kept for the next part."""
EXPIRY = 30.0
"""Seconds after which what a session does not move ends."""
STRANGERS = 64
KEPT = 256
WORKERS = 32


@dataclass(slots=True, eq=False)
class Transfer:
    """Buffers of a session, to be sent from where they lie, or memory to receive them in."""

    session: int
    number: int
    nbytes: int
    parts: int
    buffers: Sequence[Bytes]
    incoming: bool
    token: bytes = field(default_factory=bulk.token)
    open: set[int] = field(default_factory=set)
    """The parts that nobody has begun."""
    moving: dict[int, socket.socket] = field(default_factory=dict)
    """The parts that are under way."""

    def __post_init__(self) -> None:
        self.open.update(range(self.parts))

    @property
    def over(self) -> bool:
        """Whether all parts have crossed."""
        return not self.open and not self.moving

    @property
    def stream(self) -> Stream:
        """What the other end is told of it."""
        return Stream(self.token, self.nbytes, self.parts)


@dataclass(slots=True, eq=False)
class _Visitor:
    """A connection, while no part crosses it."""

    socket: socket.socket
    end: float
    """When it is closed, if it says nothing."""
    known: bool = False
    said: bytes = b""


class Dock:
    """Listens for bulk connections at a host until it is closed; all calls are safe from many threads."""

    def __init__(self, host: str, writer: Writer) -> None:
        """Memory is cut by the writer, or where that has none, from memory that only this process sees."""
        self._writer, self._spare = writer, Arena()
        self._spare_writer = self._spare.writer(0)
        self._lock = threading.Lock()
        self._tokens: dict[bytes, Transfer] = {}
        self._sessions: dict[int, dict[int, Transfer]] = {}
        self._touched: dict[int, float] = {}
        self._last = 0
        self._closed = False
        self._visitors: dict[_Visitor, None] = {}
        self._back: deque[_Visitor] = deque()
        self._deaf_until: float | None = None
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family, backlog=128, dualstack_ipv6=host == "::")
        self._listener.setblocking(False)
        self.port = int(self._listener.getsockname()[1])
        self._wake = os.eventfd(0)
        self._selector = selectors.DefaultSelector()
        for source in (self._listener, self._wake):
            self._selector.register(source, selectors.EVENT_READ)
        self._workers = ThreadPoolExecutor(WORKERS, "asyncflow-dock")
        self._thread = threading.Thread(target=self._loop, name="asyncflow-dock", daemon=True)
        self._thread.start()

    # What the control plane says

    def hold(self, session: int, buffers: Sequence[Bytes]) -> Transfer | None:
        """Keep buffers for a session until it has fetched them; None if it has too much to fetch already."""
        nbytes = _laid(buffers)[-1]
        return self._begin(session, nbytes, bulk.divided(nbytes), buffers, incoming=False)

    def reserve(self, session: int, nbytes: int, parts: int) -> Transfer | None:
        """Make room for what a session wants to send; None if it has too much of it already, or there is no memory."""
        if not (nbytes > 0 and nbytes % ALIGN == 0 and 0 < parts <= bulk.MAX_PARTS):
            raise WireError(f"{nbytes} bytes in {parts} parts cannot be sent in bulk")
        if not self._bears(session, nbytes):
            return None
        region = self._writer.take(nbytes) or self._spare_writer.take(nbytes)
        return None if region is None else self._begin(session, nbytes, parts, [region.array()], incoming=True)

    def take(self, session: int, number: int) -> Bytes:
        """Return the memory that a transfer was received in; once only, and a WireError if it is not all there."""
        with self._lock:
            transfer = self._sessions.get(session, {}).get(number)
            if transfer is None or not transfer.incoming:
                raise WireError(f"transfer {number} is none of this client's, was used before, or has expired")
            if not transfer.over:
                missing = len(transfer.open) + len(transfer.moving)
                raise WireError(f"{missing} of {transfer.parts} parts of transfer {number} have not arrived")
            self._drop(transfer)
        array = transfer.buffers[0]
        array.flags.writeable = False
        return array

    def withdraw(self, session: int, number: int) -> Transfer | None:
        """End a transfer and return it, if there is one."""
        with self._lock:
            transfer = self._sessions.get(session, {}).get(number)
            if transfer is not None:
                self._drop(transfer)
            return transfer

    def forget(self, session: int) -> None:
        """End all that a session has under way."""
        with self._lock:
            for transfer in list(self._sessions.get(session, {}).values()):
                self._drop(transfer)
            self._touched.pop(session, None)

    def close(self) -> None:
        """End everything; idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            for transfer in list(self._tokens.values()):
                self._drop(transfer)
        os.eventfd_write(self._wake, 1)
        self._thread.join()
        self._workers.shutdown()
        for visitor in [*self._visitors, *self._back]:
            visitor.socket.close()
        self._listener.close()
        self._selector.close()
        os.close(self._wake)
        self._spare.close()

    def _bears(self, session: int, nbytes: int) -> bool:
        with self._lock:
            held = sum(transfer.nbytes for transfer in self._sessions.get(session, {}).values())
        return held + nbytes <= bulk.MOST

    def _begin(
        self, session: int, nbytes: int, parts: int, buffers: Sequence[Bytes], *, incoming: bool
    ) -> Transfer | None:
        if not self._bears(session, nbytes):
            return None
        with self._lock:
            if self._closed:
                return None
            self._last += 1
            transfer = Transfer(session, self._last, nbytes, parts, buffers, incoming)
            self._tokens[transfer.token] = transfer
            self._sessions.setdefault(session, {})[transfer.number] = transfer
            self._touched[session] = time.monotonic()
            os.eventfd_write(self._wake, 1)  # which looks when it expires
        return transfer

    def _drop(self, transfer: Transfer) -> None:
        self._tokens.pop(transfer.token, None)
        of_session = self._sessions.get(transfer.session, {})
        of_session.pop(transfer.number, None)
        if not of_session:
            self._sessions.pop(transfer.session, None)
            self._touched.pop(transfer.session, None)
        for connection in transfer.moving.values():
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    # Connections

    def _loop(self) -> None:
        while not self._closed:
            for key, _ in self._selector.select(self._patience()):
                if key.fileobj is self._listener:
                    self._accept()
                elif key.fileobj == self._wake:
                    os.eventfd_read(self._wake)
                else:
                    self._hear(key.data)
            while self._back:
                self._receive(self._back.popleft())
            self._tidy(time.monotonic())

    def _patience(self) -> float | None:
        """Return the seconds until something has to be ended."""
        with self._lock:
            ends = [self._touched[session] + EXPIRY for session in self._idle()]
        ends += [visitor.end for visitor in self._visitors]
        ends += [] if self._deaf_until is None else [self._deaf_until]
        return max(0.0, min(ends) - time.monotonic()) if ends else None

    def _idle(self) -> list[int]:
        """Return the sessions of which nothing moves."""
        return [
            session for session, own in self._sessions.items() if not any(transfer.moving for transfer in own.values())
        ]

    def _tidy(self, now: float) -> None:
        for visitor in [visitor for visitor in self._visitors if visitor.end <= now]:
            self._dismiss(visitor)
        with self._lock:
            for session in self._idle():
                if self._touched[session] + EXPIRY <= now:
                    for transfer in list(self._sessions[session].values()):
                        log.warning("transfer %d of session %d was not used and has expired", transfer.number, session)
                        self._drop(transfer)
        if self._deaf_until is not None and self._deaf_until <= now:
            self._deaf_until = None
            self._selector.register(self._listener, selectors.EVENT_READ)

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except BlockingIOError:
            return
        except OSError as error:  # no descriptor is left: what waits is accepted when there may be one
            log.warning("no bulk connection can be accepted: %s", error)
            self._selector.unregister(self._listener)
            self._deaf_until = time.monotonic() + 1.0
            return
        self._receive(_Visitor(connection, time.monotonic() + GREETING))

    def _receive(self, visitor: _Visitor) -> None:
        """Listen to a connection, at the cost of the oldest one if there are too many."""
        visitor.socket.setblocking(False)
        alike = [each for each in self._visitors if each.known == visitor.known]
        if len(alike) >= (KEPT if visitor.known else STRANGERS):
            self._dismiss(alike[0])
        self._visitors[visitor] = None
        self._selector.register(visitor.socket, selectors.EVENT_READ, visitor)

    def _dismiss(self, visitor: _Visitor, word: bytes = b"") -> None:
        if self._visitors.pop(visitor, visitor) is None:
            self._selector.unregister(visitor.socket)
        with suppress(OSError):
            visitor.socket.send(word)
        visitor.socket.close()

    def _hear(self, visitor: _Visitor) -> None:
        """Read a header, and have the part that it names moved."""
        if visitor not in self._visitors:
            return
        try:
            said = visitor.socket.recv(HEADER.size - len(visitor.said))
        except BlockingIOError:
            return
        except OSError:
            said = b""
        visitor.said += said
        if not said or not MAGIC.startswith(visitor.said[: len(MAGIC)]):
            self._dismiss(visitor)
        elif len(visitor.said) == HEADER.size:
            self._start(visitor)

    def _start(self, visitor: _Visitor) -> None:
        _, token, part = HEADER.unpack(visitor.said)
        visitor.said = b""
        transfer = self._claim(token, part, visitor.socket)
        if transfer is None:
            log.info("a bulk connection named a transfer that is not there, or a part that is taken")
            self._dismiss(visitor, NO)
            return
        del self._visitors[visitor]
        self._selector.unregister(visitor.socket)
        visitor.known = True
        self._workers.submit(self._move, visitor, transfer, part)

    def _claim(self, token: bytes, part: int, connection: socket.socket) -> Transfer | None:
        with self._lock:
            transfer = self._tokens.get(token)
            if transfer is None or part not in transfer.open:
                return None
            transfer.open.discard(part)
            transfer.moving[part] = connection
            return transfer

    # Parts

    def _move(self, visitor: _Visitor, transfer: Transfer, part: int) -> None:
        good = False
        try:
            good = self._cross(visitor.socket, transfer, part)
        except OSError as error:
            # As text: who keeps the record would keep the memory, by way of the error's traceback.
            log.warning("part %d of transfer %d did not cross: %s", part, transfer.number, str(error))
        finally:
            self._settle(transfer, part, moved=False)
            if not good:
                visitor.socket.close()
        if good:
            self._wait(visitor)

    def _wait(self, visitor: _Visitor) -> None:
        visitor.end = time.monotonic() + IDLE
        self._back.append(visitor)
        with self._lock:
            if not self._closed:
                os.eventfd_write(self._wake, 1)

    def _cross(self, connection: socket.socket, transfer: Transfer, part: int) -> bool:
        """Move a part; return whether the connection can be used again."""
        bulk.prepare(connection)
        bulk.push(connection, memoryview(YES))
        start, stop = bulk.span(transfer.nbytes, transfer.parts, part)
        if transfer.incoming:
            good = bulk.receive(connection, transfer.buffers[0].data[start:stop])
        else:
            good = bulk.send(connection, transfer.buffers, start, stop)
        # Before the sender is told, whose next message may already be read then.
        self._settle(transfer, part, moved=good)
        if transfer.incoming:
            bulk.push(connection, memoryview(YES if good else NO))
        return good

    def _settle(self, transfer: Transfer, part: int, *, moved: bool) -> None:
        with self._lock:
            if transfer.moving.pop(part, None) is None:
                return
            if not moved:
                transfer.open.add(part)
            if transfer.session in self._touched:
                self._touched[transfer.session] = time.monotonic()
            if transfer.over and not transfer.incoming:
                self._drop(transfer)


class DockMemory:
    """Memory of one message of a session whose large buffers come and go by a dock."""

    def __init__(self, dock: Dock, session: int, fetches: bool) -> None:
        """Nothing is kept for a session that does not fetch."""
        self._dock, self._session, self._fetches = dock, session, fetches
        self._taken: dict[int, Bytes] = {}
        self.stream: Stream | None = None

    def place(self, buffers: Sequence[Bytes]) -> list[tuple[int, int]]:
        """Keep buffers to be fetched, if they are large enough together."""
        starts = _laid(buffers)
        large = self._fetches and starts[-1] > bulk.LARGE
        transfer = self._dock.hold(self._session, buffers) if large else None
        if transfer is None:
            return []
        self.stream = transfer.stream
        return [(transfer.number, start) for start in starts[:-1]]

    def find(self, segment: int, offset: int, nbytes: int) -> Bytes:
        """Return what the session has sent by a transfer, which is then over."""
        if segment not in self._taken:
            self._taken[segment] = self._dock.take(self._session, segment)
        return within(self._taken[segment], offset, nbytes)


def within(memory: Bytes, offset: int, nbytes: int) -> Bytes:
    """Return a buffer that was laid into memory; anything out of bounds is a WireError."""
    if not (0 <= offset <= memory.size - nbytes and offset % ALIGN == 0 and nbytes >= 0):
        raise WireError(f"bytes {offset} to {offset + nbytes} of a transfer of {memory.size}")
    return memory[offset : offset + nbytes]


def _laid(buffers: Sequence[Bytes]) -> list[int]:
    return laid([buffer.size for buffer in buffers])


def whole(transfer: Transfer) -> Bytes:
    """Return the buffers of a transfer laid one after another: a copy."""
    starts = _laid(transfer.buffers)
    memory = np.zeros(starts[-1], np.uint8)
    for start, buffer in zip(starts, transfer.buffers, strict=False):
        memory[start : start + buffer.size] = buffer
    return memory
