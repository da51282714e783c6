"""Control messages, and the codec that puts one message and its batch into frames.

Frame 0 is a MessagePack map, typed and validated; the buffers of the batch follow (`frames`). Row ids are
packed as little-endian int64 in one binary value: small integers one by one would dominate the decoding.
Any MessagePack client can speak this; nothing is ever unpickled.
"""

from collections.abc import Sequence
from typing import TypeAlias, TypeVar

import msgspec
import numpy as np

from asyncflow import errors
from asyncflow.storage import frames, orders
from asyncflow.storage.batch import Batch
from asyncflow.storage.message import Message
from asyncflow.storage.spec import PLAIN, Choice
from asyncflow.storage.status import Counts, QueueStatus, TableStatus
from asyncflow.types import Int64s

PROTOCOL = 4
MAX_HEADER = 64 << 20

Buffer: TypeAlias = bytes | memoryview


class Hello(Message, tag="hello"):
    """First message of a client."""

    protocol: int = PROTOCOL


class CreateTable(Message, tag="create_table"):
    """Create a table; the same again is harmless."""

    table: str
    columns: dict[str, str]
    max_rows: int | None = None
    max_bytes: int | None = None
    replicas: int = 1


class OpenTable(Message, tag="open_table"):
    """Ask for the columns of a table."""

    table: str


class AddColumns(Message, tag="add_columns"):
    """Add columns to a table and its living rows; the same again is harmless."""

    table: str
    columns: dict[str, str]


class DropTable(Message, tag="drop_table"):
    """End a table: its rows, streams and leases."""

    table: str


class Put(Message, tag="put"):
    """Admit the rows of the batch, each `repeat` times; waits for room."""

    table: str
    put_id: bytes
    repeat: int = 1


class Write(Message, tag="write"):
    """Add the cells of the batch to rows."""

    table: str
    rows: bytes
    lease: int | None = None


class Read(Message, tag="read"):
    """Ask for cells."""

    table: str
    rows: bytes
    columns: list[str]


class Find(Message, tag="find"):
    """Ask for the living rows of some groups, or for all of them."""

    table: str
    groups: bytes | None = None


class DeclareTask(Message, tag="declare_task"):
    """Declare a consumer group."""

    table: str
    task: str
    reads: list[str]
    sampler: str = "fifo"
    max_attempts: int = 3
    lease_seconds: float = 600.0
    durable: bool = False
    choice: Choice = PLAIN
    repairs: bool = False


class OpenStream(Message, tag="open_stream"):
    """Open a stream of batches for one consumer of a task."""

    table: str
    task: str
    rows: int | None = None
    groups: int | None = None
    partial: bool = False
    whole: bool = False
    consumer: str = ""
    rank: int = 0
    ranks: int | None = None
    split: bool = False


class Next(Message, tag="next"):
    """Ask for the next batch of a stream; waits until one can be formed."""

    stream: int


class CloseStream(Message, tag="close_stream"):
    """Give back what the stream holds, and end it."""

    stream: int


class Done(Message, tag="done"):
    """Acknowledge a lease."""

    table: str
    lease: int
    step: int | None = None


class Release(Message, tag="release"):
    """Give a lease back."""

    table: str
    lease: int
    failed: bool = False


class Extend(Message, tag="extend"):
    """Let a lease run until so many seconds from now."""

    table: str
    lease: int
    seconds: float


class Drop(Message, tag="drop"):
    """Drop rows, all of them under the lease if one is named."""

    table: str
    rows: bytes
    reason: str
    lease: int | None = None


class Commit(Message, tag="commit"):
    """Let rows go that a durable task has done up to a step."""

    table: str
    task: str
    step: int


class Rewind(Message, tag="rewind"):
    """Make rows ready again that a durable task has done after a step."""

    table: str
    task: str
    step: int


class Reset(Message, tag="reset"):
    """Make all living rows ready again that a task has done or leased."""

    table: str
    task: str


class Seal(Message, tag="seal"):
    """End the admission of rows."""

    table: str


class AskLedger(Message, tag="ledger"):
    """Ask what became of the rows."""

    table: str


class AskStatus(Message, tag="status"):
    """Ask how a table stands, or the whole queue."""

    table: str | None = None


class Snapshot(Message, tag="snapshot"):
    """Write all tables to a folder of the host that holds the queue; answered when they are on its disk."""

    folder: str


class Fail(Message, tag="fail"):
    """End every wait of every client with an error."""

    report: str


class Bye(Message, tag="bye"):
    """Last message of a client."""


class Cancel(Message, tag="cancel"):
    """End the wait of an earlier request, which is answered; this message itself is not."""

    call: int


class Map(Message, tag="map"):
    """The client maps the arena: answers may point into it. Not answered."""


class Grant(Message, tag="grant"):
    """Ask for a segment to write so many bytes into; those named are left for good."""

    bytes: int
    left: list[int]


class Unpin(Message, tag="unpin"):
    """Let so many pins of segments go. Not answered."""

    counts: dict[int, int]


class Bulk(Message, tag="bulk"):
    """The client reaches the port for bulk connections, or not: answers may ask to be fetched there. Not answered."""

    on: bool


class Reserve(Message, tag="reserve"):
    """Ask for room to send so many bytes over bulk connections, in so many parts."""

    bytes: int
    parts: int


class Withdraw(Message, tag="withdraw"):
    """End a transfer that was reserved. Not answered."""

    transfer: int


class Carry(Message, tag="carry"):
    """Ask for what a transfer has as a column of the answer, where it cannot be fetched otherwise."""

    transfer: int


Request: TypeAlias = (
    Hello | Map | Grant | Unpin | Bulk | Reserve | Withdraw | Carry | CreateTable | OpenTable | AddColumns | DropTable
    | Put | Write | Read | Find | DeclareTask | OpenStream | Next | CloseStream | Done | Release | Extend | Drop
    | Commit | Rewind | Reset | Seal | AskLedger | AskStatus | Snapshot | Fail | Bye | Cancel | orders.Question
)  # fmt: skip


class Ok(Message, tag="ok"):
    """Done; the batch, if any, is the answer."""


class Welcome(Message, tag="welcome"):
    """Answer to `hello`: the arena, for who finds the proof at a place of its file and so sees the same memory."""

    arena: str = ""
    at: int = 0
    proof: bytes = b""
    units: bool = False
    """Whether cells are held by units: puts and writes go there."""
    bulk: int = 0
    """The port for bulk connections, if there is one."""


class Granted(Message, tag="granted"):
    """Answer to `grant`; no segment if there is no memory for it."""

    segment: int | None = None


class Reserved(Message, tag="reserved"):
    """Answer to `reserve`: what bulk connections and the message name; no transfer if there is no room."""

    transfer: int = 0
    token: bytes = b""


class TableInfo(Message, tag="table"):
    """The columns of a table, identity columns included."""

    columns: dict[str, str]


class Rows(Message, tag="rows"):
    """Row ids of a put; the next one best goes to `unit`, if there are units."""

    rows: bytes
    unit: int = 0


class Found(Message, tag="found"):
    """Living rows, the group of each, and the presence bits of its columns (uint64, the same width)."""

    rows: bytes
    groups: bytes
    written: bytes


class Opened(Message, tag="opened"):
    """Id of a new stream."""

    stream: int


class Leased(Message, tag="leased", omit_defaults=True):
    """A batch under lease; of a divided step, which of how many micro-batches of the rank it is."""

    lease: int
    rows: bytes
    attempt: int
    step: int = 0
    part: int = 0
    parts: int = 1
    places: orders.Places | None = None
    """Where the cells are, held under the number of the lease; None if they come with this."""


class End(Message, tag="end"):
    """Nothing can come any more."""


class Ledgered(Message, tag="counts"):
    """Answer to `ledger`."""

    counts: Counts


class Status(Message, tag="status"):
    """Answer to `status`."""

    queue: QueueStatus | None = None
    table: TableStatus | None = None


class Failure(Message, tag="failure"):
    """The request failed, with an error of `asyncflow.errors`."""

    error: str
    message: str


Reply: TypeAlias = (
    Ok | Welcome | Granted | Reserved | TableInfo | Rows | Found | Opened | Leased | End | Ledgered | Status | Failure
    | orders.Reply
)  # fmt: skip


class Call(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A request as it is sent; the client numbers its calls."""

    call: int
    body: Request
    batch: frames.Layout | None = None


class Answer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A reply as it is sent; `call` is the number of the request, -1 where it could not be read."""

    call: int
    body: Reply
    batch: frames.Layout | None = None


T = TypeVar("T", Call, Answer)

_encoder = msgspec.msgpack.Encoder()
_calls = msgspec.msgpack.Decoder(Call)
_answers = msgspec.msgpack.Decoder(Answer)


def pack(rows: Int64s) -> bytes:
    """Pack row ids."""
    return rows.astype("<i8", copy=False).tobytes()


def unpack(rows: bytes) -> Int64s:
    """Unpack row ids; a length that is no multiple of 8 is a WireError."""
    if len(rows) % 8:
        raise errors.WireError(f"{len(rows)} bytes are no list of row ids")
    return np.frombuffer(rows, "<i8").astype(np.int64, copy=False)


def encode_call(call: int, body: Request, batch: Batch | None, memory: frames.Memory | None = None) -> list[Buffer]:
    """Return the frames of a request."""
    layout, buffers = (None, []) if batch is None else frames.pack(batch, memory)
    return [_encoder.encode(Call(call, body, layout)), *buffers]


def encode_answer(call: int, body: Reply, batch: Batch | None, memory: frames.Memory | None = None) -> list[Buffer]:
    """Return the frames of a reply."""
    layout, buffers = (None, []) if batch is None else frames.pack(batch, memory)
    return [_encoder.encode(Answer(call, body, layout)), *buffers]


def decode_call(parts: Sequence[Buffer], memory: frames.Memory | None = None) -> tuple[Call, Batch | None]:
    """Read a request; anything malformed is a WireError."""
    call = _decode(_calls, parts)
    if call.batch is not None and call.batch.stream is not None:
        raise errors.WireError("a request whose batch is still to be fetched")
    return call, None if call.batch is None else frames.unpack(call.batch, parts[1:], memory)


def decode_answer(parts: Sequence[Buffer], memory: frames.Memory | None = None) -> tuple[Answer, Batch | None]:
    """Read a reply; anything malformed is a WireError. A batch that is still to be fetched is not returned."""
    answer = _decode(_answers, parts)
    if answer.batch is None or answer.batch.stream is not None:
        return answer, None
    return answer, frames.unpack(answer.batch, parts[1:], memory)


def _decode(decoder: "msgspec.msgpack.Decoder[T]", parts: Sequence[Buffer]) -> T:
    if not parts or len(parts[0]) > MAX_HEADER:
        raise errors.WireError(f"a header of {len(parts[0]) if parts else 0} bytes")
    try:
        message = decoder.decode(parts[0])
    except (msgspec.DecodeError, RecursionError) as error:
        raise errors.WireError(f"not a message: {error}") from error
    if message.batch is None and len(parts) > 1:
        raise errors.WireError(f"{len(parts) - 1} frames that belong to no batch")
    return message


def failure(error: errors.StorageError) -> Failure:
    """Return an error as a message."""
    return Failure(type(error).__name__, str(error))


def raised(reply: Failure) -> errors.StorageError:
    """Return a message as the error it stands for."""
    kind = getattr(errors, reply.error, None)
    if not (isinstance(kind, type) and issubclass(kind, errors.StorageError)):
        return errors.StorageError(f"{reply.error}: {reply.message}")
    return kind(reply.message)
