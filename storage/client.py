"""What users hold: the queue, its tables, the streams of their tasks, and leases.

The same classes embedded and over a socket; only the link differs. All calls are safe from many threads, a
stream or a lease included. Every blocking call takes a `timeout` in seconds and ends with WaitTimeout, whose
message names the table, the task, what was waited for and the missing columns.
"""

import os
import secrets
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import Lock, Thread
from types import TracebackType
from typing import TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from asyncflow.errors import SchemaError, StorageError, UnitLost, WaitTimeout, WireError
from asyncflow.storage import snapshot, wire
from asyncflow.storage.batch import Batch, ColumnData
from asyncflow.storage.controller import Controller
from asyncflow.storage.journal import open_journal
from asyncflow.storage.link import EmbeddedLink, Link, Pending, pauses
from asyncflow.storage.memory import Room
from asyncflow.storage.message import Message
from asyncflow.storage.schema import Schema
from asyncflow.storage.spec import Choice
from asyncflow.storage.spill import Spill
from asyncflow.storage.status import Counts, QueueStatus, TableStatus
from asyncflow.types import Int64s, RowId

TIMEOUT = 60.0
DISK_TIMEOUT = 600.0

RowList: TypeAlias = Int64s | Sequence[RowId]
R = TypeVar("R", bound=Message)


class TransferQueue:
    """Columns in rows, on their way from stage to stage; open it with `TransferQueue.open`."""

    def __init__(self, link: Link) -> None:
        self._link = link

    @classmethod
    def open(
        cls,
        url: str = "embedded://",
        timeout: float = TIMEOUT,
        keys: str | os.PathLike[str] | None = None,
        durability: str = "memory",
        folder: str | os.PathLike[str] | None = None,
        memory_limit: int | None = None,
        spill: str | os.PathLike[str] | None = None,
        encrypt_bulk: bool = False,
    ) -> "TransferQueue":
        """Make a queue in this process (`embedded://`), or reach one that is served (`ipc://…`, `tcp://…`).

        `keys` is a folder that `asyncflow storage keys` has written, for a queue that is served with keys. Beyond
        this host's loopback it must be there, and may also be named by the environment variable ASYNCFLOW_KEYS. With
        keys, large batches still travel in the clear, guarded by tokens, unless `encrypt_bulk` asks for more: slower.

        With `durability` `journal` what happens is written to a log in `folder` before anybody is told, and with
        `fsync` it is also on the disk by then. A folder that has a log holds the queue that this one goes on with:
        all that clients were told of, without streams, and with what was leased ready again.

        With a `memory_limit` in bytes, cells above it move to files in the folder `spill`, which are gone when the
        process is. Puts wait while the disk is behind or full.
        """
        if url == "embedded://":
            chosen = Spill.chosen(memory_limit, spill)
            opened = open_journal(durability, folder, chosen)
            if opened is None:
                return cls(EmbeddedLink(Controller(spill=chosen)))
            journal, held = opened
            return cls(EmbeddedLink(Controller(held=held, journal=journal, spill=chosen)))
        if durability != "memory" or folder is not None:
            raise StorageError(f"{url} is held by another process, which chooses its durability")
        if memory_limit is not None or spill is not None:
            raise StorageError(f"{url} is held by another process, which chooses its memory limit")
        if url.startswith(("ipc://", "tcp://")):
            from asyncflow.storage.remote import RemoteLink  # brings the sockets, which an embedded queue never needs

            link = RemoteLink(url, timeout, keys, encrypt_bulk)
            if not link.units:
                return cls(link)
            from asyncflow.storage.cluster import ClusterLink

            return cls(ClusterLink(link, timeout, keys, encrypt_bulk))
        raise StorageError(f"{url!r} is no address of a queue: embedded://, ipc:///path or tcp://127.0.0.1:port")

    @classmethod
    def restore(
        cls,
        folder: str | os.PathLike[str],
        memory_limit: int | None = None,
        spill: str | os.PathLike[str] | None = None,
    ) -> "TransferQueue":
        """Make a queue in this process from a snapshot; a StorageError names the file that is missing or damaged.

        Streams and leases of before are gone: what was leased is ready again. `memory_limit` and `spill` as for `open`.
        """
        chosen = Spill.chosen(memory_limit, spill)
        return cls(EmbeddedLink(Controller(held=snapshot.read(Path(folder), chosen), spill=chosen)))

    def snapshot(self, folder: str | os.PathLike[str], timeout: float = DISK_TIMEOUT) -> None:
        """Have the process that holds the queue write all tables to a folder, on its disk when this returns.

        They are written as they stand now, while the queue goes on. A snapshot that is in the folder is replaced once
        the new one is complete; a StorageError leaves it as it was.
        """
        self._link.send(wire.Snapshot(os.path.abspath(folder))).result(timeout)

    @property
    def url(self) -> str:
        """The address that this queue was opened with."""
        return self._link.url

    def serve(self, url: str, keys: str | os.PathLike[str] | None = None, encrypt_bulk: bool = False) -> str:
        """Let other processes open the queue; return the address, with the port that tcp got.

        With `keys`, only clients whose key the folder has. Beyond this host's loopback they must be there, as for
        `open`; an address that means all of this host is returned as one that others may find it at. Over tcp a second
        port, which the system chooses, takes large batches in the clear; `encrypt_bulk` does without, for all clients.
        """
        return self._link.serve(url, keys, encrypt_bulk)

    def create_table(
        self,
        name: str,
        schema: Schema,
        max_rows: int | None = None,
        max_bytes: int | None = None,
        replicas: int = 1,
    ) -> "Table":
        """Create a table and return it; one that exists must be equal in schema and limits (SchemaError).

        With 2 `replicas` every row is on two storage units by the time that its put or write returns.
        """
        request = wire.CreateTable(name, schema.columns, max_rows, max_bytes, replicas)
        info = _call(self._link, request, wire.TableInfo)
        return Table(self._link, name, Schema(info.columns))

    def table(self, name: str) -> "Table":
        """Return a table that exists."""
        info = _call(self._link, wire.OpenTable(name), wire.TableInfo)
        return Table(self._link, name, Schema(info.columns))

    def drop_table(self, name: str) -> None:
        """End a table: its memory is freed, streams end with QueueClosed, what its leases would say with LeaseLost."""
        _call(self._link, wire.DropTable(name), wire.Ok)

    def status(self) -> QueueStatus:
        """Return how all tables stand."""
        status = _call(self._link, wire.AskStatus(), wire.Status)
        return _present(status.queue)

    def fail(self, report: str) -> None:
        """End every wait in every process, and all later calls, with QueueFailed and this report."""
        _call(self._link, wire.Fail(report), wire.Ok)

    def close(self) -> None:
        """Leave: a client gives back its leases; the holder ends the queue for everybody. Idempotent."""
        self._link.close()

    def __enter__(self) -> "TransferQueue":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Table:
    """A named set of rows with a schema."""

    def __init__(self, link: Link, name: str, schema: Schema) -> None:
        self._link = link
        self.name, self.schema = name, schema

    def __repr__(self) -> str:
        return f"Table({self.name!r}, {self._link.url})"

    @property
    def link(self) -> Link:
        """The way to the queue."""
        return self._link

    def put(self, batch: "Batch | Mapping[str, ColumnData]", repeat: int = 1, timeout: float = TIMEOUT) -> Int64s:
        """Admit rows and return their ids, int64; waits while the table is full.

        With `repeat` each row of the batch becomes a group of so many rows that share its cells, which are
        stored once. The queue fills in identity columns that the batch does not have: source "", prompt_id
        -1, a new group_id for each row of the batch, rollout_id 0 to repeat - 1, segment 0; with `repeat`
        the last two are always filled in.
        """
        return put_rows(_lasting(partial(self._link.send, *self.prepared(batch, repeat)), timeout))

    def send_put(self, batch: "Batch | Mapping[str, ColumnData]", repeat: int = 1) -> Pending:
        """Begin a put; `put_rows` reads the answer."""
        return self._link.send(*self.prepared(batch, repeat))

    def prepared(self, batch: "Batch | Mapping[str, ColumnData]", repeat: int = 1) -> tuple[wire.Put, Batch]:
        """Return a put as a request, which may be sent more than once: it has its effect once."""
        return wire.Put(self.name, secrets.token_bytes(16), repeat), self._batch(batch)

    def room(self, cells: Mapping[str, int | Int64s]) -> Room:
        """Make room for cells that are written in place, and then put without a copy: `put(room.batch())`.

        `cells` is the number of rows for a fixed column, and the lengths of the cells, int64, for a ragged one.
        """
        return Room(self.schema, self._link.writer(), cells)

    def write(
        self, rows: RowList, batch: "Batch | Mapping[str, ColumnData]", lease: "Lease | int | None" = None
    ) -> None:
        """Add cells to living rows, all or none; a cell that is written already must get the same value.

        Under a `lease`, all rows must be held by it and it must be in force (LeaseLost).
        """
        held = lease.id if isinstance(lease, Lease) else lease
        _lasting(partial(self._link.send, *self.prepared_write(rows, batch, held)), TIMEOUT)

    def send_write(self, rows: RowList, batch: "Batch | Mapping[str, ColumnData]", lease: int | None = None) -> Pending:
        """Begin a write."""
        return self._link.send(*self.prepared_write(rows, batch, lease))

    def prepared_write(
        self, rows: RowList, batch: "Batch | Mapping[str, ColumnData]", lease: int | None = None
    ) -> tuple[wire.Write, Batch]:
        """Return a write as a request."""
        return wire.Write(self.name, _pack(rows), lease), self._batch(batch)

    def _batch(self, columns: "Batch | Mapping[str, ColumnData]") -> Batch:
        names = columns.names if isinstance(columns, Batch) else columns.keys()
        if not set(names) <= self.schema.columns.keys():
            # Another client may have added them.
            self.schema = Schema(_call(self._link, wire.OpenTable(self.name), wire.TableInfo).columns)
        return Batch.of(self.schema, columns)

    def add_columns(self, columns: Mapping[str, str]) -> None:
        """Add columns, name to dtype, to the table and its living rows; the same again is harmless."""
        info = _call(self._link, wire.AddColumns(self.name, dict(columns)), wire.TableInfo)
        self.schema = Schema(info.columns)

    def read(self, rows: RowList, columns: Sequence[str]) -> Batch:
        """Return cells in the order of `rows` without consuming them (RowGone, ColumnMissing)."""
        return batch_of(self.send_read(rows, columns).result(TIMEOUT))

    def send_read(self, rows: RowList, columns: Sequence[str]) -> Pending:
        """Begin a read; `batch_of` takes the answer."""
        return self._link.send(wire.Read(self.name, _pack(rows), list(columns)))

    def find(self, groups: RowList | None = None) -> "Found":
        """Return the living rows of some groups, group after group and each in put order, or all there are."""
        request = wire.Find(self.name, None if groups is None else _pack(groups))
        found = _call(self._link, request, wire.Found)
        written = wire.unpack(found.written).view(np.uint64)
        return Found(wire.unpack(found.rows), wire.unpack(found.groups), written, self.schema)

    def task(
        self,
        name: str,
        reads: Sequence[str],
        sampler: str = "fifo",
        max_attempts: int = 3,
        lease_seconds: float = 600.0,
        durable: bool = False,
        tokens: str | Sequence[str] = (),
        version: str = "",
        priority: str = "",
        budget: int = 0,
        uses: int = 1,
        max_age: int | None = None,
        share: float = 0.5,
        seed: int = 0,
        ordered: bool = False,
        repairs: bool = False,
    ) -> None:
        """Declare a consumer group, which sees all living rows; the same again is harmless.

        A row whose lease is lost for the `max_attempts`th time is dropped with the reason
        `max_attempts:<task>`. The rows of a `durable` task retire only after `commit`. `sampler` is

        - `fifo`: in row order, `group`: whole groups;
        - `ordered`: whole groups, none before one that was admitted earlier; those under lease are passed over;
        - `token_balanced`: micro-batches of at most `budget` tokens for each of several ranks; `tokens` names
          ragged columns, whose lengths add up, or an integer column; steps of groups are as `ordered` says;
        - `freshest`: by the oldest version of a row, from the column `version`, the newest first;
        - `priority`: by the column `priority`, the highest first;
        - `replay`: new rows, and up to `share` of a batch rows that are done, drawn by `seed`: each is used
          `uses` times in all, at most `max_age` versions behind the newest row (of column `version`).

        A task that `repairs` reads nothing, and gets only rows that have lost their cells with a storage unit. It
        writes those anew that no other task makes, under its lease.
        """
        names = (tokens,) if isinstance(tokens, str) else tuple(tokens)
        choice = Choice(names, version, priority, budget, uses, max_age, float(share), seed, ordered)
        seconds = float(lease_seconds)
        request = wire.DeclareTask(
            self.name, name, list(reads), sampler, max_attempts, seconds, durable, choice, repairs
        )
        _call(self._link, request, wire.Ok)

    def stream(
        self,
        task: str,
        rows: int | None = None,
        groups: int | None = None,
        partial: bool = False,
        whole: bool = False,
        credit: int = 1,
        consumer: str = "",
        rank: int = 0,
        ranks: int | None = None,
        split: bool = False,
    ) -> "Stream":
        """Open a stream of batches of `rows` or `groups`, or of all that is ready where neither is given.

        `partial` takes fewer than asked, at least one. `whole` waits until every living row that the task
        has not done is ready. `credit` is how many batches may be asked for at once: 1 leases nothing before
        `next` wants it; with more, so many less one are fetched ahead.

        Of a `token_balanced` task, `rows` or `groups` are those of a step, which is divided over `ranks`, and the
        stream gets the micro-batches of its `rank`. Groups stay whole in a micro-batch, unless `split`.
        """
        wishes = {"rows": rows, "groups": groups, "credit": credit, "rank": rank, "ranks": ranks}
        for name, wish in wishes.items():
            if wish is not None and (isinstance(wish, bool) or not isinstance(wish, int | np.integer)):
                raise SchemaError(f"{name} of a stream: expected a whole number, found {wish!r}")
        request = wire.OpenStream(self.name, task, rows, groups, partial, whole, consumer, rank, ranks, split)
        opened = _call(self._link, request, wire.Opened)
        return Stream(self._link, self.name, opened.stream, credit)

    def adopt(self, lease: int, rows: RowList, attempt: int = 1) -> "Lease":
        """Return a lease that another process holds, to end or extend it here; its batch has no columns."""
        packed = _pack(rows)
        return Lease(self._link, self.name, wire.Leased(lease, packed, attempt), Batch(rows=len(packed) // 8))

    def commit(self, task: str, step: int) -> None:
        """Let the rows retire that a durable task has done with a step up to this one."""
        _call(self._link, wire.Commit(self.name, task, step), wire.Ok)

    def rewind(self, task: str, step: int) -> None:
        """Make every row ready again that a durable task has done with a later step (RowGone if committed)."""
        _call(self._link, wire.Rewind(self.name, task, step), wire.Ok)

    def reset(self, task: str) -> None:
        """Make all living rows ready again that a task has done or leased; its leases are over (LeaseLost)."""
        _call(self._link, wire.Reset(self.name, task), wire.Ok)

    def drop(self, rows: RowList, reason: str) -> None:
        """Drop rows for a reason that the ledger keeps; rows that are gone already are left alone."""
        _call(self._link, wire.Drop(self.name, _pack(rows), reason), wire.Ok)

    def seal(self) -> None:
        """Take no new rows: streams end when nothing more can come, and a last batch may be smaller."""
        _call(self._link, wire.Seal(self.name), wire.Ok)

    def drop_table(self) -> None:
        """End the table, as `TransferQueue.drop_table` does."""
        _call(self._link, wire.DropTable(self.name), wire.Ok)

    def ledger(self) -> Counts:
        """Return what became of the rows."""
        return _call(self._link, wire.AskLedger(self.name), wire.Ledgered).counts

    def status(self) -> TableStatus:
        """Return what the table holds and how its tasks stand."""
        return _present(_call(self._link, wire.AskStatus(self.name), wire.Status).table)


@dataclass(frozen=True, slots=True)
class Found:
    """Living rows of a table, as they stood when they were looked for."""

    rows: Int64s
    groups: Int64s
    """Group id of each row."""
    written: npt.NDArray[np.uint64]
    """Presence bits of the columns of each row, in the order of the schema."""
    schema: Schema

    def __len__(self) -> int:
        return len(self.rows)

    def has(self, columns: Sequence[str]) -> npt.NDArray[np.bool_]:
        """Return which rows have all of these columns."""
        need = self.schema.mask(list(columns))
        having: npt.NDArray[np.bool_] = self.written & need == need
        return having


class Stream:
    """Batches of one task for one consumer, under lease."""

    def __init__(self, link: Link, table: str, stream: int, credit: int) -> None:
        self._link, self._table, self._id = link, table, stream
        self._ahead = max(credit, 1) - 1
        self._asked: deque[Pending] = deque()
        self._lock = Lock()

    def next(self, timeout: float = TIMEOUT) -> "Lease | None":
        """Return the next batch, or None when nothing can come any more.

        The end is told when the table is sealed and the task has no row left to be ready, nor any that is
        leased elsewhere and might come back. A batch that comes after a WaitTimeout is given back.
        """
        pending = self.ask()
        try:
            return self.lease(pending.result(timeout))
        except WaitTimeout:
            if not pending.failed:
                # Not by whoever brings the answer: nothing may be asked there.
                late = Thread(target=self.give_back, args=(pending,), name="asyncflow-surplus", daemon=True)
                pending.then(late.start)
            raise
        except StorageError:
            raise
        except BaseException:
            # A signal's handler may raise: the batch that comes then is for the next call.
            with self._lock:
                self._asked.appendleft(pending)
            raise

    def ask(self) -> Pending:
        """Ask for the next batch, or take what was asked for ahead; `lease` reads the answer."""
        with self._lock:
            pending = self._asked.popleft() if self._asked else self._link.send(wire.Next(self._id))
            while len(self._asked) < self._ahead:
                self._asked.append(self._link.send(wire.Next(self._id)))
            return pending

    def lease(self, answer: tuple[wire.Reply, Batch | None]) -> "Lease | None":
        """Return the lease of an answer, or None at the end."""
        reply, batch = answer
        if isinstance(reply, wire.End):
            return None
        return Lease(self._link, self._table, _expected(reply, wire.Leased), _present(batch))

    def give_back(self, pending: Pending) -> None:
        """Give back, attempt not counted, a batch that has come when nobody waited for it any more."""
        with suppress(StorageError):
            lease = self.lease(pending.result(0))
            if lease is not None:
                self._link.send(wire.Release(self._table, lease.id))

    def __iter__(self) -> "Iterator[Lease]":
        while (lease := self.next()) is not None:
            yield lease

    def close(self) -> None:
        """Give back all leases of this stream that are not done, attempts not counted; idempotent."""
        _call(self._link, wire.CloseStream(self._id), wire.Ok)

    def __enter__(self) -> "Stream":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Lease:
    """Rows handed to one consumer until it is done with them or its time runs out."""

    def __init__(self, link: Link, table: str, leased: wire.Leased, batch: Batch) -> None:
        self._link, self._table = link, table
        self.id = leased.lease
        self.rows: Int64s = wire.unpack(leased.rows)
        """Row ids, in the order of the batch."""
        self.attempt = leased.attempt
        """How often the rows have been leased, this time included: the largest number among them."""
        self.step, self.part, self.parts = leased.step, leased.part, leased.parts
        """Of a `token_balanced` task: the number of the step's plan, and which micro-batch of how many this is."""
        self.batch = batch
        """The columns that the task reads, then the identity columns."""

    def __len__(self) -> int:
        return len(self.rows)

    def __repr__(self) -> str:
        return f"Lease({self.id}, {len(self.rows)} rows, attempt {self.attempt})"

    def done(self, step: int | None = None, *, others: "Sequence[Lease]" = ()) -> None:
        """Acknowledge the rows (LeaseLost if it is too late); a durable task names the step that used them.

        Those of `others` are acknowledged with them, without a wait for each. LeaseLost if it is too late for any;
        the rest is acknowledged all the same.
        """
        asked = [lease._link.send(wire.Done(lease._table, lease.id, step)) for lease in (*others, self)]
        deadline = time.monotonic() + TIMEOUT
        for pending in asked:
            _expected(pending.result(max(0.0, deadline - time.monotonic()))[0], wire.Ok)

    def release(self, failed: bool = False) -> None:
        """Give the rows back; the attempt counts only if they `failed`."""
        _call(self._link, wire.Release(self._table, self.id, failed), wire.Ok)

    def extend(self, seconds: float) -> None:
        """Let the lease run until so many seconds from now."""
        _call(self._link, wire.Extend(self._table, self.id, float(seconds)), wire.Ok)

    def drop(self, rows: RowList, reason: str) -> None:
        """Drop some rows of the lease for good; the rest stays leased."""
        _call(self._link, wire.Drop(self._table, _pack(rows), reason, self.id), wire.Ok)


def _call(
    link: Link, request: wire.Request, expect: type[R], batch: Batch | None = None, timeout: float = TIMEOUT
) -> R:
    reply, _ = link.send(request, batch).result(timeout)
    return _expected(reply, expect)


def _lasting(send: Callable[[], Pending], timeout: float) -> tuple[wire.Reply, Batch | None]:
    """Send a request, and again if the storage unit that it went to is lost: it has its effect once."""
    deadline, lost = time.monotonic() + timeout, None
    for pause in pauses(timeout):
        try:
            return send().result(max(deadline - time.monotonic(), 0))
        except UnitLost as error:
            lost = error.args
        time.sleep(pause)
    if lost is not None:
        raise UnitLost(*lost)
    return send().result(timeout)


def put_rows(answer: tuple[wire.Reply, Batch | None]) -> Int64s:
    """Return the row ids that a put was answered with."""
    return wire.unpack(_expected(answer[0], wire.Rows).rows)


def batch_of(answer: tuple[wire.Reply, Batch | None]) -> Batch:
    """Return the batch that a read was answered with."""
    return _present(answer[1])


def _expected(reply: Message, expect: type[R]) -> R:
    if not isinstance(reply, expect):
        raise WireError(f"the answer is {type(reply).__name__}, not {expect.__name__}")
    return reply


T = TypeVar("T")


def _present(value: T | None) -> T:
    if value is None:
        raise WireError("the answer lacks its content")
    return value


def _pack(rows: RowList) -> bytes:
    found = np.asarray(rows).reshape(-1)
    if found.size and found.dtype.kind not in "iu":
        raise SchemaError(f"row ids are whole numbers, found {found.dtype}")
    return wire.pack(found.astype(np.int64))
