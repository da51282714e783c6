"""The socket of a client. Whoever waits for an answer reads, for all who wait.

A thread that reads for the others would cost two changes of thread a call. It is started only where answers are heard
by functions, and reads from then on.
"""

import math
import os
import select
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import zmq
from zmq.utils.monitor import recv_monitor_message

from asyncflow.errors import MissingDependency, QueueClosed, StorageError
from asyncflow.storage.address import six
from asyncflow.storage.keys import lock, refusal
from asyncflow.storage.server import OPTIONS, readable
from asyncflow.storage.wire import Buffer


class Connection:
    """A DEALER that many threads send to, and one at a time reads from."""

    def __init__(
        self,
        url: str,
        peer: str,
        keys: Path | None,
        heard: "Callable[[list[zmq.Frame]], None]",
        over: Callable[[StorageError], None],
    ) -> None:
        """Let `heard` have each message, in the order in which they came, and `over` the error that ends them."""
        self._peer, self._keys, self._heard, self._over = peer, keys, heard, over
        self.ended: StorageError | None = None
        """Why the connection is over, if it is and somebody has read so."""
        self._io = threading.Lock()
        """Held to use the socket."""
        # Entered by itself: a handler that raises while a Condition is entered would leave it locked.
        self._lock = threading.Lock()
        self._turns = threading.Condition(self._lock)
        self._leader = 0
        """The thread that reads, and polls without holding `_io`."""
        self._followers = 0
        self._thread: threading.Thread | None = None
        self._freed = False
        self._process = os.getpid()
        self._wake = os.eventfd(0)
        self._socket = zmq.Context().socket(zmq.DEALER)
        self._events = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED | _REFUSED)
        # The collector would end the context first, which waits for the sockets for ever.
        self._release = weakref.finalize(self, _dispose, self._process, self._wake, self._socket, self._events)
        self._release.atexit = False
        try:
            self._connect(url)
        except (StorageError, MissingDependency):
            self._free()
            raise
        self._told = self._events.FD
        # A descriptor tells only of what comes after somebody has found nothing; a refusal may have come by now.
        self._early = readable(self._events)
        self._poll = self._polling()

    def _connect(self, url: str) -> None:
        self._socket.setsockopt(zmq.IPV6, six(url))
        for option, value in _OPTIONS.items():
            self._socket.setsockopt(option, value)
        try:
            if self._keys is not None:
                lock(self._socket, self._keys)
            self._socket.connect(url)
        except zmq.ZMQError as error:
            raise StorageError(f"{url}: {error}") from error

    @property
    def owned(self) -> bool:
        """Whether this is the process that opened it, and none that was forked from that."""
        return os.getpid() == self._process

    def own(self) -> None:
        """Refuse to be used by a process that was forked."""
        if not self.owned:
            raise StorageError(f"{self._peer} was opened by the process that this one was forked from: open it here")

    def send(self, frames: list[Buffer]) -> None:
        """Send a message, from any thread; nothing is sent when the connection is over."""
        with self._io:
            if self.ended is not None:
                return
            try:
                # One that was refused takes nothing any more: the event that tells so ends the connection.
                with suppress(zmq.Again):
                    self._socket.send_multipart(frames, zmq.NOBLOCK, copy=False)
                # The descriptor tells of a message once: whoever polls must be told of one that came meanwhile.
                if self._leader and readable(self._socket):
                    os.eventfd_write(self._wake, 1)
            except BaseException:
                # A signal's handler may raise anywhere: half a message must not be taken for the head of the next.
                self.ended = self._interrupted()
                os.eventfd_write(self._wake, 1)
                raise

    def wait(self, arrived: Callable[[], bool], timeout: float) -> bool:
        """Read, or let another read, until something has arrived; return whether it has, at the end of the time."""
        self.own()
        deadline = time.monotonic() + min(timeout, _LONGEST)
        if self._leader == threading.get_ident():
            self._interject(arrived, deadline)
            return arrived()
        try:
            while not arrived():
                left = deadline - time.monotonic()
                if left <= 0:
                    return False
                if self._lead():
                    self._read(arrived, deadline, self._poll)
                    self._leave()
                else:
                    self._follow(lambda: arrived() or self._vacant, left)
            return True
        finally:
            self._leave()

    def _interject(self, arrived: Callable[[], bool], deadline: float) -> None:
        """Read for a signal's handler, which interrupts the thread that reads, and have that look around."""
        while not arrived() and time.monotonic() < deadline:
            self._read(arrived, deadline, self._polling())
        self._rouse()

    def attend(self) -> None:
        """Have a thread read from now on."""
        self.own()
        with self._lock:
            if self._thread is not None or self.ended is not None:
                return
            thread = threading.Thread(target=self._attend, name="asyncflow-client", daemon=True)
            thread.start()
            self._thread = thread
        self._rouse()

    @property
    def attended(self) -> bool:
        """Whether a thread reads."""
        return self._thread is not None

    def end(self, error: StorageError) -> None:
        """Read no more than the message that is being heard."""
        self.ended = self.ended or error

    def close(self, error: StorageError) -> None:
        """End it; idempotent."""
        with self._io:
            self.ended = self.ended or error
        self._rouse()
        try:
            while not self._lead():
                self._follow(lambda: self._vacant, 1.0)
            self._finish()
        finally:
            self._leave()

    # Turns

    @property
    def _vacant(self) -> bool:
        """Whether nobody reads, and anybody may."""
        return self._leader == 0 and (self._thread is None or self.ended is not None)

    def _lead(self) -> bool:
        me = threading.get_ident()
        with self._lock:
            if self._vacant or (self._leader == 0 and self._thread is threading.current_thread()):
                self._leader = me
            return self._leader == me

    def _leave(self) -> None:
        """Stop to lead, whoever does."""
        if self._leader == threading.get_ident():
            with self._lock:
                self._leader = 0
                self._turns.notify_all()

    def _follow(self, until: Callable[[], bool], timeout: float) -> None:
        with self._lock:
            self._followers += 1
            try:
                self._turns.wait_for(until, timeout)
            finally:
                self._followers -= 1

    def _attend(self) -> None:
        try:
            while not self._lead():
                self._follow(lambda: self._leader == 0, 1.0)
            self._read(lambda: False, math.inf, self._poll)
        finally:
            self._leave()

    def _rouse(self) -> None:
        """Have whoever polls look around."""
        with self._io:
            if not self._freed:
                os.eventfd_write(self._wake, 1)

    # Reading, by whoever leads

    def _read(self, arrived: Callable[[], bool], deadline: float, poll: select.poll) -> None:
        """Read until something has arrived, the time is over, the connection is, or a thread is to take over."""
        thread, over = self._thread, self._early
        while self.ended is None:
            self._take(arrived, over)
            left = deadline - time.monotonic()
            if self.ended is not None or arrived() or self._thread is not thread or left <= 0:
                break
            ready = [fd for fd, _ in poll.poll(None if left == math.inf else math.ceil(left * 1000))]
            over = self._told in ready
            if self._wake in ready and self.ended is None:
                os.eventfd_read(self._wake)
        if self.ended is not None:
            self._finish()

    def _polling(self) -> select.poll:
        poll = select.poll()
        for descriptor in () if self._freed else (self._socket.FD, self._told, self._wake):
            poll.register(descriptor, select.POLLIN)
        return poll

    def _take(self, arrived: Callable[[], bool], over: bool) -> None:
        """Pass on what has come, at least until something has arrived; answers before the end, if it is `over`."""
        try:
            end = self._event() if over else None
            while (end or not arrived()) and (parts := self._next()) is not None:
                self._heard(parts)
                if self._followers:
                    with self._lock:
                        self._turns.notify_all()
            self.ended = self.ended or end
        except BaseException:
            self.ended = self.ended or self._interrupted()
            self._finish()
            raise

    def _next(self) -> "list[zmq.Frame] | None":
        with self._io:
            if self.ended is not None or not readable(self._socket):
                return None
            return self._socket.recv_multipart(zmq.NOBLOCK, copy=False)

    def _event(self) -> StorageError | None:
        if not readable(self._events):
            return None
        event = int(recv_monitor_message(self._events)["event"])
        if event & _REFUSED:
            return refusal(self._peer, self._keys, event)
        return QueueClosed(f"{self._peer} is gone: the connection broke")

    def _interrupted(self) -> StorageError:
        return QueueClosed(f"the connection to {self._peer} was ended by an interrupt in the middle of a message")

    def _finish(self) -> None:
        """Tell of the end, and free the socket."""
        self._over(self.ended or QueueClosed(f"{self._peer} cannot be reached"))
        self._free()

    def _free(self) -> None:
        with self._io:
            if self._freed:
                return
            self._freed = True
            self._release()


def _dispose(process: int, wake: int, socket: "zmq.Socket[bytes]", events: "zmq.Socket[bytes]") -> None:
    os.close(wake)
    if os.getpid() == process:  # what a fork has inherited is the parent's
        socket.disable_monitor()
        events.close(0)
        socket.close(0)
        socket.context.term()


_LONGEST = 2_000_000.0
"""Seconds that a wait lasts at most: poll counts milliseconds in 31 bits."""
_REFUSED = zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
_OPTIONS = {**OPTIONS, zmq.LINGER: 0}
