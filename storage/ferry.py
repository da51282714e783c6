"""A client's end of bulk connections: sends arrays from where they lie, and receives into memory that is used again.

Connections are made when they are needed and kept for the next message. A part that fails is tried once more, over a
connection of its own; what then fails is an OSError, and whoever asked sends frames instead. Work is done in threads of
its own, so that neither the socket of the connection nor who uses it waits.
"""

import logging
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import TypeAlias
from weakref import WeakSet

import numpy as np

from asyncflow.errors import WireError
from asyncflow.storage import bulk
from asyncflow.storage.arena import Arena, Bytes
from asyncflow.storage.bulk import HEADER, MAGIC, NO, YES
from asyncflow.storage.dock import within
from asyncflow.storage.frames import Layout, Stream, large_sizes
from asyncflow.storage.memory import laid

log = logging.getLogger(__name__)

REACH = 3.0
"""Seconds that a connection may take to be made."""
IDLE = 30.0
"""Seconds after which a connection is not used again, well before the other end closes it."""
JOBS = 8
"""Messages that are on their way at once."""

Move: TypeAlias = Callable[[socket.socket, int, int], bool]


class Trip:
    """The connections that carry one message, which whoever waits for it may end."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._connections: set[socket.socket] = set()
        self.over = False

    def check(self) -> None:
        """Raise an OSError if the trip was ended."""
        if self.over:
            raise ConnectionAbortedError("it was ended here")

    def enter(self, connection: socket.socket) -> None:
        """Hear of a connection that is used; an OSError if it is too late for that."""
        with self._lock:
            self.check()
            self._connections.add(connection)

    def leave(self, connection: socket.socket) -> None:
        """Hear that a connection is not used any more."""
        with self._lock:
            self._connections.discard(connection)

    def end(self) -> None:
        """End what is under way."""
        with self._lock:
            self.over = True
            for connection in self._connections:
                with suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)


class Ferry:
    """Bulk connections to one server, until it is closed; safe from many threads."""

    def __init__(self, host: str, port: int) -> None:
        """Make sure that the port is reached; an OSError if it is not."""
        self._where = host, port
        self._lock = threading.Lock()
        self._idle: deque[tuple[float, socket.socket]] = deque()
        self._trips: WeakSet[Trip] = WeakSet()
        self._closed = False
        self._connect().close()
        self._arena = Arena()
        self._writer = self._arena.writer(0)
        self._jobs = ThreadPoolExecutor(JOBS, "asyncflow-ferry")
        # Never waited for by one another, so that messages that wait for their parts cannot use up all of them.
        self._lanes = ThreadPoolExecutor(JOBS * (bulk.STREAMS - 1) or 1, "asyncflow-lane")

    def submit(self, work: Callable[[], None]) -> bool:
        """Do something in a thread of the ferry; return whether that will be done."""
        try:
            self._jobs.submit(work)
        except RuntimeError:  # it was closed
            return False
        return True

    def trip(self) -> Trip:
        """Return a new trip, which ends with the ferry at the latest."""
        trip = Trip()
        with self._lock:
            trip.over = self._closed
            self._trips.add(trip)
        return trip

    def send(self, trip: Trip, stream: Stream, buffers: Sequence[Bytes]) -> None:
        """Send buffers, laid one after another; an OSError if they do not arrive."""
        self._carry(trip, stream, lambda connection, *span: bulk.send(connection, buffers, *span))

    def fetch(self, trip: Trip, stream: Stream) -> Bytes:
        """Return what a stream has, laid one after another; an OSError if it does not arrive."""
        region = self._writer.take(stream.bytes)
        memory = np.empty(stream.bytes, np.uint8) if region is None else region.array()
        self._carry(trip, stream, partial(_receive, memory.data))
        return memory

    def _carry(self, trip: Trip, stream: Stream, move: Move) -> None:
        others = [self._lanes.submit(self._part, trip, stream, part, move) for part in range(1, stream.parts)]
        try:
            self._part(trip, stream, 0, move)
        finally:
            # All have ended before the memory is let go; one that fails has ended the others.
            failures = [failure for each in others if (failure := each.exception()) is not None]
        for failure in failures:
            raise failure

    def _part(self, trip: Trip, stream: Stream, part: int, move: Move) -> None:
        start, stop = bulk.span(stream.bytes, stream.parts, part)
        said = memoryview(HEADER.pack(MAGIC, stream.token, part))
        try:
            trip.check()
            try:
                self._once(
                    trip, self._kept() or self._connect(), said, lambda connection: move(connection, start, stop)
                )
            except ConnectionRefusedError:
                raise
            except OSError as error:
                trip.check()
                log.info("part %d of %d is tried once more: %s", part, stream.parts, str(error))
                self._once(trip, self._connect(), said, lambda connection: move(connection, start, stop))
        except OSError:
            trip.end()
            raise

    def _once(
        self, trip: Trip, connection: socket.socket, said: memoryview, move: Callable[[socket.socket], bool]
    ) -> None:
        good = False
        try:
            trip.enter(connection)
            bulk.push(connection, said)
            if bulk.pull(connection, 1) != YES:
                raise ConnectionRefusedError("the server has no such transfer, or it has expired")
            if not move(connection):
                raise ConnectionError("bytes were damaged on their way")
            good = True
        finally:
            trip.leave(connection)
            if good:
                self._idle.append((time.monotonic(), connection))
            else:
                connection.close()

    def _kept(self) -> socket.socket | None:
        """Return a connection that was used before, and not long ago."""
        while True:
            try:
                since, connection = self._idle.pop()
            except IndexError:
                return None
            if time.monotonic() - since < IDLE:
                return connection
            connection.close()

    def _connect(self) -> socket.socket:
        connection = socket.create_connection(self._where, REACH)
        bulk.prepare(connection)
        return connection

    def abort(self) -> None:
        """End what is under way, and begin nothing more; does not wait."""
        with self._lock:
            self._closed = True
            trips = list(self._trips)
        for trip in trips:
            trip.end()
        self._jobs.shutdown(wait=False)

    def close(self) -> None:
        """Wait until all has ended; idempotent."""
        self.abort()
        self._jobs.shutdown()
        self._lanes.shutdown()
        while (connection := self._kept()) is not None:
            connection.close()
        self._arena.close()


class Shipped:
    """Memory of one message whose large buffers were sent before it."""

    stream: Stream | None = None

    def __init__(self, transfer: int) -> None:
        self._transfer = transfer

    def place(self, buffers: Sequence[Bytes]) -> list[tuple[int, int]]:
        """Return where the buffers were laid."""
        return [(self._transfer, start) for start in laid([buffer.size for buffer in buffers])[:-1]]

    def find(self, segment: int, offset: int, nbytes: int) -> Bytes:
        """Refuse: nothing is found in what was sent."""
        raise WireError("a message that was sent has no memory of the other end")


class Landed:
    """Memory of one message whose large buffers were fetched."""

    stream: Stream | None = None

    def __init__(self, memory: Bytes) -> None:
        self._memory = memory
        self._memory.flags.writeable = False

    def place(self, buffers: Sequence[Bytes]) -> list[tuple[int, int]]:
        """Place nothing."""
        return []

    def find(self, segment: int, offset: int, nbytes: int) -> Bytes:
        """Return a buffer that was fetched."""
        return within(self._memory, offset, nbytes)


def fetchable(layout: Layout) -> Stream:
    """Return the stream of a layout, after what it claims was compared with the columns."""
    assert layout.stream is not None
    stream, sizes = layout.stream, large_sizes(layout)
    if sum(sizes) > bulk.MOST or laid(sizes)[-1] != stream.bytes or not 0 < stream.parts <= bulk.MAX_PARTS:
        raise WireError(f"a stream of {stream.bytes} bytes in {stream.parts} parts for buffers of {sum(sizes)} bytes")
    return stream


def _receive(memory: memoryview, connection: socket.socket, start: int, stop: int) -> bool:
    good = bulk.receive(connection, memory[start:stop])
    bulk.push(connection, memoryview(YES if good else NO))
    return good
