"""The asyncio face of a queue: the same calls as `client`, awaited. Both kinds mix in one process.

    queue = await aio.connect("ipc:///tmp/queue")
    async with (await queue.table("train")).stream("reward", rows=8) as stream:
        async for lease in stream: ...

A call that is cancelled is taken back: a batch that was on its way is given back at once, its attempt not counted.
What a call sends is copied in the loop's thread before it first waits, which takes as long as copying it does; to a
queue on another host it is sent from where it lies, and must stay as it is until the call returns.
"""

import asyncio
import os
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from types import TracebackType
from typing import Any, TypeVar

from asyncflow.errors import StorageError, UnitLost, WaitTimeout
from asyncflow.storage import client, wire
from asyncflow.storage.batch import Batch, ColumnData
from asyncflow.storage.client import DISK_TIMEOUT, TIMEOUT, RowList
from asyncflow.storage.link import Pending, pauses
from asyncflow.storage.schema import Schema
from asyncflow.storage.status import Counts, QueueStatus, TableStatus
from asyncflow.types import Int64s

R = TypeVar("R")


async def connect(
    url: str,
    timeout: float = TIMEOUT,
    keys: str | os.PathLike[str] | None = None,
    encrypt_bulk: bool = False,
    memory_limit: int | None = None,
    spill: str | os.PathLike[str] | None = None,
) -> "AsyncQueue":
    """Reach a queue that is served, or make one in this process (`embedded://`), without holding up the loop.

    The arguments are those of `TransferQueue.open`.
    """
    opened: deque[client.TransferQueue] = deque()
    given_up = threading.Event()

    def opening() -> None:
        queue = client.TransferQueue.open(
            url, timeout, keys, memory_limit=memory_limit, spill=spill, encrypt_bulk=encrypt_bulk
        )
        opened.append(queue)
        if given_up.is_set():
            _close(opened)

    try:
        await asyncio.to_thread(opening)
    except asyncio.CancelledError:
        given_up.set()
        threading.Thread(target=_close, args=(opened,), name="asyncflow-close", daemon=True).start()
        raise
    return AsyncQueue(opened.pop())


def _close(opened: "deque[client.TransferQueue]") -> None:
    while opened:
        with suppress(IndexError):  # two may come here for one queue
            opened.popleft().close()


async def answered(pending: Pending, timeout: float, surplus: Callable[[], None] | None = None) -> Pending:
    """Wait until a request is answered; `surplus` is called, in a thread, if the answer comes when nobody waits."""
    loop = asyncio.get_running_loop()
    arrived: asyncio.Future[None] = loop.create_future()
    pending.then(lambda: _wake(loop, arrived))
    try:
        await asyncio.wait({arrived}, timeout=timeout)
        if not arrived.done():
            pending.cancel()
            await asyncio.wait({arrived}, timeout=pending.grace)
        if not arrived.done():
            raise WaitTimeout(f"{pending.peer} did not answer within {timeout:g} s")
    except (asyncio.CancelledError, WaitTimeout):
        pending.cancel()
        if surplus is not None:
            # Not in the loop, which may be over, nor where the answer is brought, where nothing may be asked.
            pending.then(threading.Thread(target=surplus, name="asyncflow-surplus", daemon=True).start)
        raise
    return pending


async def _lasting(send: Callable[[], Pending], timeout: float) -> tuple[wire.Reply, Batch | None]:
    """Send a request, and again if the storage unit that it went to is lost: it has its effect once."""
    deadline, lost = time.monotonic() + timeout, None
    for pause in pauses(timeout):
        try:
            return (await answered(send(), max(deadline - time.monotonic(), 0))).result(0)
        except UnitLost as error:
            lost = error.args
        await asyncio.sleep(pause)
    if lost is not None:
        raise UnitLost(*lost)
    return (await answered(send(), timeout)).result(0)


def _wake(loop: asyncio.AbstractEventLoop, arrived: "asyncio.Future[None]") -> None:
    with suppress(RuntimeError):  # a loop that is over needs no waking
        loop.call_soon_threadsafe(arrived.set_result, None)


class AsyncQueue:
    """A queue whose calls are awaited."""

    def __init__(self, queue: client.TransferQueue) -> None:
        self.blocking = queue
        """The same queue with calls that block."""

    async def create_table(
        self,
        name: str,
        schema: Schema,
        max_rows: int | None = None,
        max_bytes: int | None = None,
        replicas: int = 1,
    ) -> "AsyncTable":
        """Create a table, or return the equal one that exists."""
        return AsyncTable(
            await asyncio.to_thread(self.blocking.create_table, name, schema, max_rows, max_bytes, replicas)
        )

    async def table(self, name: str) -> "AsyncTable":
        """Return a table that exists."""
        return AsyncTable(await asyncio.to_thread(self.blocking.table, name))

    async def status(self) -> QueueStatus:
        """Return how all tables stand."""
        return await asyncio.to_thread(self.blocking.status)

    async def snapshot(self, folder: str | os.PathLike[str], timeout: float = DISK_TIMEOUT) -> None:
        """Have all tables written to a folder of the process that holds the queue."""
        await asyncio.to_thread(self.blocking.snapshot, folder, timeout)

    async def close(self) -> None:
        """Leave, as the blocking queue does."""
        await asyncio.to_thread(self.blocking.close)

    async def __aenter__(self) -> "AsyncQueue":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


class AsyncTable:
    """A table whose calls are awaited; `blocking` has those that are rare."""

    def __init__(self, table: client.Table) -> None:
        self.blocking = table
        self.name, self._link = table.name, table.link

    async def put(self, batch: Batch | Mapping[str, ColumnData], repeat: int = 1, timeout: float = TIMEOUT) -> Int64s:
        """Admit rows and return their ids; waits while the table is full."""
        request, cells = self.blocking.prepared(batch, repeat)
        return client.put_rows(await _lasting(partial(self._link.send, request, cells), timeout))

    async def write(
        self, rows: RowList, batch: Batch | Mapping[str, ColumnData], lease: "AsyncLease | int | None" = None
    ) -> None:
        """Add cells to living rows, all or none."""
        held = lease.id if isinstance(lease, AsyncLease) else lease
        request, cells = self.blocking.prepared_write(rows, batch, held)
        await _lasting(partial(self._link.send, request, cells), TIMEOUT)

    async def read(self, rows: RowList, columns: Sequence[str]) -> Batch:
        """Return cells in the order of `rows` without consuming them."""
        return client.batch_of((await answered(self.blocking.send_read(rows, columns), TIMEOUT)).result(0))

    def stream(self, task: str, **wishes: Any) -> "AsyncStream":
        """Return a stream of batches, opened when it is entered or first asked; wishes as for a blocking one."""
        return AsyncStream(self.blocking, task, wishes)

    async def task(self, name: str, reads: Sequence[str], **settings: Any) -> None:
        """Declare a consumer group."""
        await asyncio.to_thread(lambda: self.blocking.task(name, reads, **settings))

    async def commit(self, task: str, step: int) -> None:
        """Let the rows retire that a durable task has done with a step up to this one."""
        await self._tell(wire.Commit(self.name, task, step))

    async def seal(self) -> None:
        """Take no new rows."""
        await self._tell(wire.Seal(self.name))

    async def ledger(self) -> Counts:
        """Return what became of the rows."""
        return await asyncio.to_thread(self.blocking.ledger)

    async def status(self) -> TableStatus:
        """Return what the table holds and how its tasks stand."""
        return await asyncio.to_thread(self.blocking.status)

    async def _tell(self, request: wire.Request) -> None:
        (await answered(self._link.send(request), TIMEOUT)).result(0)


class AsyncStream:
    """Batches of one task for one consumer, under lease."""

    def __init__(self, table: client.Table, task: str, wishes: Mapping[str, Any]) -> None:
        self._table, self._task, self._wishes = table, task, dict(wishes)
        self._opening: asyncio.Task[client.Stream] | None = None

    async def next(self, timeout: float = TIMEOUT) -> "AsyncLease | None":
        """Return the next batch, or None when nothing can come any more."""
        stream = await self._opened()
        pending = stream.ask()
        await answered(pending, timeout, partial(stream.give_back, pending))
        lease = stream.lease(pending.result(0))
        return None if lease is None else AsyncLease(lease, self._table)

    async def __aiter__(self) -> AsyncIterator["AsyncLease"]:
        while (lease := await self.next()) is not None:
            yield lease

    async def close(self) -> None:
        """Give back all leases that are not done, attempts not counted; idempotent."""
        if self._opening is not None:
            stream = await self._opened()
            await asyncio.to_thread(stream.close)

    async def __aenter__(self) -> "AsyncStream":
        await self._opened()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def _opened(self) -> client.Stream:
        if self._opening is None or self._opening.cancelled():
            # One for all who ask meanwhile, and kept when one of them is cancelled: a second would be lost to `close`.
            opening = asyncio.to_thread(lambda: self._table.stream(self._task, **self._wishes))
            self._opening = asyncio.ensure_future(opening)
        opened = self._opening
        try:
            return await asyncio.shield(opened)
        except StorageError:
            self._opening = None if self._opening is opened else self._opening
            raise


class AsyncLease:
    """A lease whose calls are awaited."""

    def __init__(self, lease: client.Lease, table: client.Table) -> None:
        self._lease, self._table = lease, table
        self.id, self.rows, self.attempt, self.batch = lease.id, lease.rows, lease.attempt, lease.batch

    def __len__(self) -> int:
        return len(self.rows)

    async def done(self, step: int | None = None) -> None:
        """Acknowledge the rows; a durable task names the step that used them."""
        await self._tell(wire.Done(self._table.name, self.id, step))

    async def release(self, failed: bool = False) -> None:
        """Give the rows back; the attempt counts only if they `failed`."""
        await self._tell(wire.Release(self._table.name, self.id, failed))

    async def extend(self, seconds: float) -> None:
        """Let the lease run until so many seconds from now."""
        await self._tell(wire.Extend(self._table.name, self.id, float(seconds)))

    async def _tell(self, request: wire.Request) -> None:
        (await answered(self._table.link.send(request), TIMEOUT)).result(0)
