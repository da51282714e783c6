"""What crosses a bulk connection: the large buffers of one message, as plain bytes over tcp.

The buffers are laid one after another, each at a multiple of `ALIGN`, and cut into parts. For each part:

    client      magic, token, number of the part
    server      a byte: whether it may begin
    sender      the bytes of the part, and their xxh3
    receiver    a byte: whether they match

A token is handed out over the control connection, for a size that was agreed there: nothing that is said here makes
anybody allocate anything. A connection carries parts one after another. It is not encrypted.
"""

import math
import secrets
import socket
import struct
from collections.abc import Iterator, Sequence

import xxhash

from asyncflow.storage.arena import ALIGN, Bytes

LARGE = 16 << 20
"""Messages with buffers of more bytes than this use bulk connections."""
MOST = 1 << 32
"""Bytes that one session may have under way; what is more is sent as frames."""
PART = 32 << 20
"""Bytes that are worth a connection of their own."""
STREAMS = 2
"""Connections that carry one message at most."""
MAX_PARTS = 64
CHUNK = 4 << 20
"""Bytes that are hashed while they are in the cache, before they are sent or after they were received."""
SILENCE = 20.0
"""Seconds without a byte after which a peer counts as dead."""
HEADER = struct.Struct("<4s16sI")
MAGIC = b"AFB1"
YES, NO = b"\x01", b"\x00"
_DIGEST = 8
_PAD = memoryview(bytes(ALIGN))


def token() -> bytes:
    """Return a new token, which nobody can guess."""
    return secrets.token_bytes(16)


def divided(nbytes: int) -> int:
    """Return how many parts so many bytes are best sent in."""
    return max(1, min(STREAMS, nbytes // PART))


def span(nbytes: int, parts: int, part: int) -> tuple[int, int]:
    """Return where a part begins and ends."""
    step = -(-nbytes // parts)
    step += -step % ALIGN
    return min(part * step, nbytes), min((part + 1) * step, nbytes)


def prepare(connection: socket.socket) -> None:
    """Bound every wait of a connection; the kernel does it, so that a call moves as much as it can."""
    connection.setblocking(True)
    fraction, seconds = math.modf(SILENCE)
    patience = struct.pack("@ll", int(seconds), int(fraction * 1e6))
    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        connection.setsockopt(socket.SOL_SOCKET, option, patience)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def send(connection: socket.socket, buffers: Sequence[Bytes], start: int, stop: int) -> bool:
    """Send bytes `start` to `stop` of buffers that are laid one after another; return whether they have arrived."""
    digest = xxhash.xxh3_64()
    for piece in _pieces(buffers, start, stop):
        digest.update(piece)
        push(connection, piece)
    push(connection, memoryview(digest.digest()))
    return pull(connection, 1) == YES


def receive(connection: socket.socket, memory: memoryview) -> bool:
    """Fill the memory; return whether the bytes are those that were sent, which the sender is still to be told."""
    digest = xxhash.xxh3_64()
    for at in range(0, len(memory), CHUNK):
        piece = memory[at : at + CHUNK]
        _fill(connection, piece)
        digest.update(piece)
    return pull(connection, _DIGEST) == digest.digest()


def push(connection: socket.socket, data: memoryview) -> None:
    """Send all of the bytes, as long as some of them go."""
    while data:
        try:
            data = data[connection.send(data) :]
        except BlockingIOError:
            raise TimeoutError(f"not a byte could be sent for {SILENCE:g} s") from None


def pull(connection: socket.socket, nbytes: int) -> bytes:
    """Receive so many bytes."""
    memory = bytearray(nbytes)
    _fill(connection, memoryview(memory))
    return bytes(memory)


def _fill(connection: socket.socket, memory: memoryview) -> None:
    while memory:
        try:
            received = connection.recv_into(memory, 0, socket.MSG_WAITALL)
        except BlockingIOError:
            raise TimeoutError(f"not a byte came for {SILENCE:g} s, {len(memory)} of a piece are missing") from None
        if not received:
            raise ConnectionResetError(f"the connection was closed where {len(memory)} bytes of a piece are missing")
        memory = memory[received:]


def _pieces(buffers: Sequence[Bytes], start: int, stop: int) -> Iterator[memoryview]:
    at = 0
    for buffer in buffers:
        for data in (buffer.data, _PAD[: -buffer.size % ALIGN]):
            for low in range(max(at, start), min(at + len(data), stop), CHUNK):
                yield data[low - at : min(low + CHUNK, at + len(data), stop) - at]
            at += len(data)
