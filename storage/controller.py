"""Tables, streams and the requests that wait: one lock, no sockets.

A request is answered at once, or parked and answered by whatever completes it: a put by room, a `next` by
rows. Nothing here blocks and nothing is polled. Deadlines of waits belong to those who wait: they cancel,
and the request is answered with WaitTimeout. The only clock is the expiry of leases, watched by one thread
that sleeps until the next one.

Delivery: rows and readiness change under the lock in which waiting requests are looked at again, so there is
no moment between test and wait in which a notice could be lost.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeAlias, TypeVar

import numpy as np
from msgspec.structs import replace

from asyncflow.errors import QueueClosed, QueueFailed, SchemaError, StorageError, WaitTimeout
from asyncflow.storage import wire
from asyncflow.storage.batch import Batch
from asyncflow.storage.ledger import TaskSpec, listed
from asyncflow.storage.sampler import BLOCKED, LEASED, READY, Wish
from asyncflow.storage.schema import IDENTITY, Schema
from asyncflow.storage.status import QueueStatus, TableStatus, Wait
from asyncflow.storage.store import Intake, Limits, Store

Outcome: TypeAlias = tuple[wire.Reply, Batch | None] | StorageError
Answer: TypeAlias = Callable[[Outcome], None]

T = TypeVar("T")

_OK = wire.Ok(), None


@dataclass(slots=True, eq=False)
class Ticket:
    """A request that has not been answered; `answer` is called exactly once."""

    session: int
    request: wire.Request
    answer: Answer
    batch: Batch | None = None
    intake: Intake | None = None
    open: bool = True
    since: float = 0.0

    def settle(self, outcome: Outcome) -> None:
        """Answer the request, unless it was answered before."""
        if self.open:
            self.open = False
            self.answer(outcome)


@dataclass(frozen=True, slots=True)
class Flow:
    """An open stream: what one consumer of a task asks for."""

    id: int
    store: Store
    task: str
    wish: Wish
    session: int
    consumer: str

    @property
    def wanted(self) -> str:
        """What a batch is to hold, for messages."""
        if self.wish.everything:
            return "all rows" if self.wish.whole else "any rows"
        kind = "groups" if self.wish.rows is None else "rows"
        return f"{self.wish.groups if self.wish.rows is None else self.wish.rows} {kind}"


@dataclass(slots=True)
class Waiting:
    """Parked requests of one table, first come first."""

    puts: list[Ticket] = field(default_factory=list)
    nexts: list[Ticket] = field(default_factory=list)


class Controller:
    """Answers the requests of all sessions; safe to call from any thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._alarm = threading.Condition(self._lock)
        self._watched: float | None = None
        self._stores: dict[str, Store] = {}
        self._waiting: dict[str, Waiting] = {}
        self._flows: dict[int, Flow] = {}
        self._sessions: set[int] = set()
        self._last_id = 0
        self._failed: str | None = None
        self._closed = False
        self._watch = threading.Thread(target=self._watch_leases, name="asyncflow-leases", daemon=True)
        self._watch.start()

    # Sessions

    def join(self) -> int:
        """Open a session: one client, whose streams end with it."""
        with self._lock:
            self._sessions.add(session := self._new_id())
            return session

    def leave(self, session: int, lost: bool) -> None:
        """End a session and give back its leases; attempts count if the client was lost."""
        with self._lock:
            self._sessions.discard(session)
            for waiting in self._waiting.values():
                for ticket in [ticket for ticket in (*waiting.puts, *waiting.nexts) if ticket.session == session]:
                    ticket.settle(QueueClosed("the client has left"))
            for flow in [flow for flow in self._flows.values() if flow.session == session]:
                self._end_flow(flow, counted=lost)

    def submit(self, session: int, request: wire.Request, batch: Batch | None, answer: Answer) -> Ticket:
        """Answer a request now, or park it; the batch becomes the controller's."""
        ticket = Ticket(session, request, answer, batch, since=self._clock())
        with self._lock:
            try:
                outcome = self._handle(ticket)
            except StorageError as error:
                outcome = error
            if outcome is not None:
                ticket.settle(outcome)
        return ticket

    def cancel(self, ticket: Ticket) -> None:
        """End the wait of a request with WaitTimeout, if it has not been answered."""
        with self._lock:
            if ticket.open:
                ticket.settle(WaitTimeout(self._awaited(ticket)))

    def close(self) -> None:
        """End every wait with QueueClosed and let all rows go; idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._wake(lambda: QueueClosed("the queue was closed"))
            self._stores.clear()
            self._flows.clear()
            self._alarm.notify()
        if threading.current_thread() is not self._watch:
            self._watch.join()

    # Requests

    def _handle(self, ticket: Ticket) -> Outcome | None:
        request = ticket.request
        if self._closed:
            raise QueueClosed("the queue is closed")
        if self._failed is not None and not isinstance(request, wire.AskStatus | wire.AskLedger | wire.Bye):
            raise QueueFailed(self._failed)
        match request:
            case wire.Put():
                return self._put(ticket, request)
            case wire.Next():
                return self._next(ticket, request)
            case wire.Write():
                return self._write(request, _needed(ticket.batch))
            case wire.Read():
                return wire.Ok(), self._store(request.table).read(wire.unpack(request.rows), request.columns)
            case wire.Done() | wire.Release() | wire.Extend() | wire.Drop():
                return self._settle(request)
            case wire.Commit() | wire.Rewind() | wire.Seal() | wire.DeclareTask():
                return self._govern(request)
            case wire.OpenStream() | wire.CloseStream():
                return self._stream(request, ticket.session)
            case _:
                return self._administer(request)

    def _administer(self, request: wire.Request) -> Outcome:
        match request:
            case wire.CreateTable():
                return self._create(request)
            case wire.Find():
                return self._find(request), None
            case wire.OpenTable():
                return wire.TableInfo(self._store(request.table).schema.columns), None
            case wire.AskLedger():
                return wire.Ledgered(self._store(request.table).counts()), None
            case wire.AskStatus(table=None):
                return wire.Status(queue=self._status()), None
            case wire.AskStatus(table=str(table)):
                return wire.Status(table=self._table_status(self._store(table))), None
            case wire.Fail():
                self._failed = request.report
                self._wake(lambda: QueueFailed(request.report))
        return _OK

    def _create(self, request: wire.CreateTable) -> Outcome:
        schema, limits = Schema(request.columns), Limits(request.max_rows, request.max_bytes)
        store = self._stores.get(request.table)
        if store is None:
            store = self._stores[request.table] = Store(request.table, schema, limits)
            self._waiting[request.table] = Waiting()
        if (store.schema, store.limits) != (schema, limits):
            raise SchemaError(f"table {request.table!r} exists with {store.schema} and {store.limits}")
        return wire.TableInfo(schema.columns), None

    def _find(self, request: wire.Find) -> wire.Found:
        ledger = self._store(request.table).ledger
        rows = ledger.find(None if request.groups is None else wire.unpack(request.groups))
        written = ledger.written(rows).view(np.int64)
        return wire.Found(wire.pack(rows), wire.pack(ledger.groups.ids(rows)), wire.pack(written))

    def _put(self, ticket: Ticket, request: wire.Put) -> Outcome | None:
        store, waiting = self._store(request.table), self._waiting[request.table]
        if ticket.intake is None:
            ticket.intake = store.intake(_needed(ticket.batch), request.repeat, request.put_id)
            ticket.batch = None
        if store.ledger.sealed:
            raise QueueClosed(f"table {store.name!r} is sealed: it takes no new rows")
        # First come first: a small put does not overtake a large one that waits for room.
        if (waiting.puts and waiting.puts[0] is not ticket) or not store.fits(ticket.intake):
            if ticket not in waiting.puts:
                waiting.puts.append(ticket)
            return None
        rows = store.admit(ticket.intake)
        ticket.settle((wire.Rows(wire.pack(rows)), None))
        self._deliver(store)
        return None

    def _write(self, request: wire.Write, batch: Batch) -> Outcome:
        store, rows = self._store(request.table), wire.unpack(request.rows)
        if request.lease is not None:
            store.ledger.covers(request.lease, rows, self._clock())
        store.write(rows, batch)
        self._deliver(store)
        return _OK

    def _settle(self, request: wire.Done | wire.Release | wire.Extend | wire.Drop) -> Outcome:
        store, now = self._store(request.table), self._clock()
        match request:
            case wire.Done():
                store.ledger.finish(request.lease, now, request.step)
            case wire.Release():
                store.ledger.release(request.lease, now, request.failed)
            case wire.Extend():
                store.ledger.extend(request.lease, request.seconds, now)
                self._rouse(store)
            case wire.Drop():
                if request.lease is not None:
                    store.ledger.covers(request.lease, wire.unpack(request.rows), now)
                store.ledger.drop(wire.unpack(request.rows), request.reason)
        self._advance(store)
        return _OK

    def _govern(self, request: wire.Commit | wire.Rewind | wire.Seal | wire.DeclareTask) -> Outcome:
        store = self._store(request.table)
        match request:
            case wire.Commit():
                store.ledger.commit(request.task, request.step)
            case wire.Rewind():
                store.ledger.rewind(request.task, request.step)
            case wire.Seal():
                self._seal(store)
            case wire.DeclareTask():
                spec = TaskSpec(
                    tuple(request.reads),
                    request.sampler,
                    request.max_attempts,
                    request.lease_seconds,
                    request.durable,
                )
                store.ledger.declare(request.task, spec, store.schema.mask(spec.reads))
        self._advance(store)
        return _OK

    def _seal(self, store: Store) -> None:
        store.ledger.sealed = True
        for ticket in self._waiting[store.name].puts:
            ticket.settle(QueueClosed(f"table {store.name!r} was sealed"))

    def _stream(self, request: wire.OpenStream | wire.CloseStream, session: int) -> Outcome:
        if isinstance(request, wire.CloseStream):
            if request.stream in self._flows:
                self._end_flow(self._flows[request.stream], counted=False)
            return _OK
        store = self._store(request.table)
        wish = Wish(request.rows, request.groups, request.partial, request.whole)
        task = store.ledger.task(request.task)
        if not task.sampler.accepts(wish):
            raise SchemaError(f"task {task.name!r} samples by {task.spec.sampler!r}: it cannot give {wish}")
        if (wish.rows or wish.groups or 1) < 1 or 0 in (wish.rows, wish.groups):
            raise SchemaError("a batch has at least one row")
        flow = Flow(self._new_id(), store, task.name, wish, session, request.consumer)
        self._flows[flow.id] = flow
        return wire.Opened(flow.id), None

    def _next(self, ticket: Ticket, request: wire.Next) -> Outcome | None:
        flow = self._flows.get(request.stream)
        if flow is None:
            raise QueueClosed("the stream was closed")
        outcome = self._form(flow)
        if outcome is None:
            self._waiting[flow.store.name].nexts.append(ticket)
        self._advance(flow.store)
        return outcome

    # What completes a wait

    def _form(self, flow: Flow) -> Outcome | None:
        """Form the next batch of a stream, or tell its end; None if it has to wait."""
        store, ledger, now = flow.store, flow.store.ledger, self._clock()
        ledger.expire(now)
        grant = ledger.lease(flow.task, flow.wish, now, flow.id)
        if grant is not None:
            self._rouse(store)
            columns = dict.fromkeys((*ledger.task(flow.task).spec.reads, *IDENTITY))
            batch = store.read(grant.rows, tuple(columns))
            return wire.Leased(grant.id, wire.pack(grant.rows), grant.attempt), batch
        return (wire.End(), None) if ledger.exhausted(flow.task, flow.id) else None

    def _advance(self, store: Store) -> None:
        """Free what went, let waiting puts in, and hand out what became ready."""
        store.sweep()
        puts = self._waiting[store.name].puts
        puts[:] = [ticket for ticket in puts if ticket.open]
        while puts and puts[0].intake is not None and store.fits(puts[0].intake):
            ticket = puts.pop(0)
            ticket.settle((wire.Rows(wire.pack(store.admit(_needed(ticket.intake)))), None))
        self._deliver(store)

    def _deliver(self, store: Store) -> None:
        """Answer every parked `next` that can be answered, oldest first."""
        nexts = self._waiting[store.name].nexts
        for ticket in nexts:
            if ticket.open and isinstance(ticket.request, wire.Next):
                outcome = self._form(self._flows[ticket.request.stream])
                if outcome is not None:
                    ticket.settle(outcome)
        nexts[:] = [ticket for ticket in nexts if ticket.open]

    def _end_flow(self, flow: Flow, counted: bool) -> None:
        del self._flows[flow.id]
        for ticket in self._waiting[flow.store.name].nexts:
            if isinstance(ticket.request, wire.Next) and ticket.request.stream == flow.id:
                ticket.settle(QueueClosed("the stream was closed"))
        flow.store.ledger.abandon(flow.id, counted)
        self._advance(flow.store)

    def _wake(self, error: Callable[[], StorageError]) -> None:
        """Answer everything that waits with an error."""
        for waiting in self._waiting.values():
            for ticket in (*waiting.puts, *waiting.nexts):
                ticket.settle(error())
            waiting.puts.clear()
            waiting.nexts.clear()

    # Leases that expire

    def _rouse(self, store: Store) -> None:
        """Wake the watch if a lease expires before the time that it sleeps until."""
        expiry = store.ledger.next_expiry()
        if expiry is not None and (self._watched is None or expiry < self._watched):
            self._alarm.notify()

    def _watch_leases(self) -> None:
        with self._lock:
            while not self._closed:
                for store in self._stores.values():
                    if store.ledger.expire(self._clock()):
                        self._advance(store)
                expiries = [store.ledger.next_expiry() for store in self._stores.values()]
                self._watched = min((expiry for expiry in expiries if expiry is not None), default=None)
                self._alarm.wait(None if self._watched is None else max(0.0, self._watched - self._clock()))

    # Answers

    def _store(self, table: str) -> Store:
        if table not in self._stores:
            raise SchemaError(f"no table {table!r}; tables: {', '.join(self._stores) or 'none'}")
        return self._stores[table]

    def _status(self) -> QueueStatus:
        tables = {name: self._table_status(store) for name, store in self._stores.items()}
        return QueueStatus(tables, len(self._flows), max(0, len(self._sessions) - 1), self._failed)

    def _table_status(self, store: Store) -> TableStatus:
        """Add what only the controller knows: how old leases are, and who waits."""
        status, now = store.status(), self._clock()
        tasks = {}
        for name, counts in status.tasks.items():
            since = store.ledger.oldest_lease(name)
            tasks[name] = replace(counts, oldest_lease=None if since is None else now - since)
        return replace(status, tasks=tasks, waits=self._waits(store, now))

    def _waits(self, store: Store, now: float) -> list[Wait]:
        waiting, missing, found = self._waiting[store.name], dict[str, list[str]](), []
        for ticket in (*waiting.puts, *waiting.nexts):
            if not ticket.open:
                continue
            if isinstance(ticket.request, wire.Next):
                flow = self._flows[ticket.request.stream]
                if flow.task not in missing:
                    missing[flow.task] = _lacking(store, flow.task)
                about = flow.wanted, now - ticket.since, ticket.session, flow.task, flow.consumer, missing[flow.task]
                found.append(Wait(*about))
            elif ticket.intake is not None:
                room = f"room for {ticket.intake.rows} rows and {ticket.intake.nbytes} bytes"
                found.append(Wait(room, now - ticket.since, ticket.session))
        return found

    def _awaited(self, ticket: Ticket) -> str:
        """Say what a request waited for."""
        if isinstance(ticket.request, wire.Next):
            return _rows_awaited(self._flows[ticket.request.stream])
        if isinstance(ticket.request, wire.Put) and ticket.intake is not None:
            return _room_awaited(self._store(ticket.request.table), ticket.intake)
        return f"{type(ticket.request).__name__} was not answered in time"

    def _new_id(self) -> int:
        self._last_id += 1
        return self._last_id


def _needed(value: T | None) -> T:
    if value is None:
        raise SchemaError("the request needs a batch")
    return value


def _lacking(store: Store, task: str) -> list[str]:
    """Return the columns that the oldest blocked rows of a task lack; a status looks at no more than these."""
    return store.missing(store.ledger.blocked(task)[:1024], store.ledger.task(task).need)


def _rows_awaited(flow: Flow) -> str:
    store, task = flow.store, flow.store.ledger.task(flow.task)
    counts = f"{task.counts[READY]} ready, {task.counts[LEASED]} leased, {task.counts[BLOCKED]} blocked"
    blocked = store.ledger.blocked(flow.task)
    missing = store.missing(blocked, task.need)
    lacking = f"; {listed(blocked)} without {', '.join(missing)}" if missing else ""
    who = f" (consumer {flow.consumer!r})" if flow.consumer else ""
    return f"table {store.name!r}, task {task.name!r}{who}: waited for {flow.wanted}; {counts}{lacking}"


def _room_awaited(store: Store, intake: Intake) -> str:
    status = store.status()
    tasks = "; ".join(
        f"task {name!r}: {task.waiting} ready, {task.leased} leased, {task.blocked} blocked"
        for name, task in status.tasks.items()
    )
    return (
        f"table {store.name!r}: a put of {intake.rows} rows and {intake.nbytes} bytes waited for room; it holds "
        f"{status.rows} rows and {status.bytes} bytes, at most {store.limits.rows} rows and {store.limits.bytes} "
        f"bytes; {tasks or 'no tasks: nothing ever leaves'}"
    )
