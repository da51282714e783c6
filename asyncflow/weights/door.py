"""A listening socket for those who know its token, and connections whose every wait ends at a deadline.

The token is a secret of the offers, which travel with the commands of the flow. A caller that does not know it is
turned away before it has cost more than a thread for a moment. Messages are a length and as many bytes; nothing is
encrypted.
"""

import hmac
import logging
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from asyncflow.errors import ConfigError

log = logging.getLogger(__name__)

CHUNK = 4 << 20
MOST = 64 << 20
"""Bytes of a message; weights are no messages, and may have any size."""
_MAGIC = b"AFW1"
_TOKEN = 32
_KNOCK = 5.0
"""Seconds within which a caller says the token."""
_CALLERS = 256
"""Connections at a time; more are turned away."""
_LENGTH = struct.Struct("<I")


class Wire:
    """One connection; what does not happen by the deadline is a TimeoutError, and one that ends an OSError."""

    def __init__(self, connection: socket.socket, deadline: float | None) -> None:
        """`deadline` is of `time.monotonic`; None: the other end may take as long as it wants."""
        self.connection, self.deadline = connection, deadline
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, data: bytes | memoryview) -> None:
        """Send all bytes."""
        data = memoryview(data)
        for at in range(0, len(data), CHUNK):
            self._bound()
            self.connection.sendall(data[at : at + CHUNK])

    def fill(self, memory: memoryview) -> None:
        """Receive as many bytes as there is memory for."""
        while memory:
            self._bound()
            received = self.connection.recv_into(memory[:CHUNK])
            if not received:
                raise ConnectionResetError(f"the other end closed the connection, {len(memory)} bytes are missing")
            memory = memory[received:]

    def say(self, message: bytes) -> None:
        """Send a message."""
        self.send(_LENGTH.pack(len(message)) + message)

    def hear(self) -> bytes:
        """Receive a message."""
        head = bytearray(_LENGTH.size)
        self.fill(memoryview(head))
        (length,) = _LENGTH.unpack(head)
        if length > MOST:
            raise ConnectionError(f"a message of {length} bytes")
        message = bytearray(length)
        self.fill(memoryview(message))
        return bytes(message)

    def close(self) -> None:
        """End it, also for a thread that waits on it; idempotent."""
        with suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)
        self.connection.close()

    def _bound(self) -> None:
        if self.deadline is None:
            self.connection.settimeout(None)
            return
        left = self.deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("timed out")
        self.connection.settimeout(left)


class Door:
    """Lets callers in, each in a thread of its own."""

    def __init__(self, host: str, serve: Callable[[Wire], None]) -> None:
        """Listen on a free port of an address; `serve` may raise OSError, which ends that connection alone."""
        self.token = secrets.token_hex(_TOKEN // 2)
        self._serve = serve
        try:
            self._listening = socket.create_server((host, 0), family=family(host), backlog=64)
        except OSError as error:
            raise ConfigError(f"weights.host: {host} is no address to listen on here: {error.strerror}") from error
        self.host, self.port = host, int(self._listening.getsockname()[1])
        self._lock = threading.Lock()
        self._wires: set[Wire] = set()
        self._closed = threading.Event()
        threading.Thread(target=self._accept, name="asyncflow-door", daemon=True).start()

    def close(self) -> None:
        """Let nobody in, and end every connection; idempotent."""
        self._closed.set()
        with suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        with self._lock:
            wires = list(self._wires)
        for wire in wires:
            wire.close()

    def _accept(self) -> None:
        while not self._closed.is_set():
            try:
                connection, _ = self._listening.accept()
            except OSError as error:
                if not self._closed.is_set():
                    log.warning("a receiver of weights could not connect: %s", error)
                    self._closed.wait(1.0)  # too many files are open, and that does not end at once
                continue
            try:
                self._meet(connection)
            except (OSError, RuntimeError) as error:  # it is gone already, or no thread can be started
                log.warning("a receiver of weights was not let in: %s", error)
                connection.close()

    def _meet(self, connection: socket.socket) -> None:
        wire = Wire(connection, time.monotonic() + _KNOCK)
        with self._lock:
            if self._closed.is_set() or len(self._wires) >= _CALLERS:
                wire.close()
                return
            self._wires.add(wire)
        try:
            threading.Thread(target=self._let_in, args=(wire,), name="asyncflow-receiver", daemon=True).start()
        except RuntimeError:
            with self._lock:
                self._wires.discard(wire)
            raise

    def _let_in(self, wire: Wire) -> None:
        try:
            said = bytearray(len(_MAGIC) + _TOKEN)
            wire.fill(memoryview(said))
            if hmac.compare_digest(bytes(said), _MAGIC + self.token.encode()):
                wire.deadline = None
                self._serve(wire)
        except OSError as error:
            if not self._closed.is_set():
                log.info("a receiver of weights is gone: %s", error)
        finally:
            with self._lock:
                self._wires.discard(wire)
            wire.close()


def knock(host: str, port: int, token: str, deadline: float) -> Wire:
    """Connect to a door; an OSError if nobody answers by the deadline."""
    connection = socket.create_connection((host, port), max(0.001, deadline - time.monotonic()))
    wire = Wire(connection, deadline)
    try:
        wire.send(_MAGIC + token.encode())
    except BaseException:
        wire.close()
        raise
    return wire


def family(host: str) -> socket.AddressFamily:
    """Return the kind of an address."""
    return socket.AF_INET6 if ":" in host else socket.AF_INET
