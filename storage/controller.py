"""The tables, streams and sessions of a queue: one lock, no sockets.

Requests go to the desk of their table, which answers or parks them. Nothing here blocks and nothing is polled.
Deadlines of waits belong to those who wait: they cancel, and the request is answered with WaitTimeout. The only
clock is the expiry of leases, watched by one thread that sleeps until the next one.
"""

import itertools
import logging
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TypeAlias

import numpy as np

from asyncflow.errors import LeaseLost, QueueClosed, QueueFailed, SchemaError, StorageError, WaitTimeout
from asyncflow.storage import effect, snapshot, wire
from asyncflow.storage.batch import Batch
from asyncflow.storage.desk import OK, Desk, Flow
from asyncflow.storage.journal import Journal
from asyncflow.storage.orders import (
    Admit,
    AskUnits,
    Attach,
    Cut,
    Freed,
    Grown,
    Locate,
    Mirrored,
    Note,
    Spilled,
    UnitList,
    Watch,
    Written,
)
from asyncflow.storage.placed import PlacedStore
from asyncflow.storage.placed_desk import PlacedDesk
from asyncflow.storage.schema import Schema
from asyncflow.storage.spill import Spill
from asyncflow.storage.status import QueueStatus
from asyncflow.storage.store import Limits, Store
from asyncflow.storage.ticket import Answer, Outcome, Ticket
from asyncflow.storage.units import Units

__all__ = ["Answer", "Controller", "Outcome", "Ticket"]

log = logging.getLogger(__name__)

_Unit: TypeAlias = Attach | Freed | Written | AskUnits | Grown | Mirrored | Spilled


class Controller:
    """Answers the requests of all sessions; safe to call from any thread."""

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        held: snapshot.Held | None = None,
        journal: Journal | None = None,
        units: Units | None = None,
        spill: Spill | None = None,
    ) -> None:
        """Begin with no tables, or with those that a snapshot held; record what happens in a journal.

        With `units`, cells are held there, and there is no journal. With `spill`, which is the one of the tables that
        were held, some cells are on a disk.
        """
        if units is not None and journal is not None:
            raise StorageError("a queue with storage units keeps no journal: take snapshots")
        self.units = units
        self._clock = clock
        self._lock = threading.Lock()
        self._alarm = threading.Condition(self._lock)
        self._watched: float | None = None
        self._desks: dict[str, Desk] = {}
        self._flows: dict[int, Flow] = {}
        self._sessions: set[int] = set()
        self._ids = itertools.count(1)
        # Over all tables, also one after another of the same name: what an old handle names is never another's.
        self._leases: Iterator[int] = itertools.count(1)
        self._bases: dict[str, int] = {}
        self._askers: list[tuple[Ticket, dict[int, int]]] = []
        self._failed: str | None = None
        self._closed = False
        # One at a time, outside of the lock: nobody else waits for the disk.
        self._writer = ThreadPoolExecutor(1, "asyncflow-snapshot")
        if held is not None:
            self._leases, self._bases = held.leases, dict(held.bases)
            self._desks = {store.name: Desk(store, clock, self._rouse) for store in held.stores}
        self._journal = journal
        if journal is not None:
            journal.failed = self._disk_failed
            for name, desk in self._desks.items():
                desk.store.record(journal.scribe(name))
        self._spill = spill
        if spill is not None:
            spill.start(self._lock, self._relieved)
        self._watch = threading.Thread(target=self._watch_leases, name="asyncflow-leases", daemon=True)
        self._watch.start()

    # Sessions

    def join(self) -> int:
        """Open a session: one client, whose streams end with it."""
        with self._lock:
            self._sessions.add(session := next(self._ids))
            return session

    def adopt(self, stores: list[PlacedStore], bases: dict[str, int], leases: Iterator[int]) -> None:
        """Go on with the tables of a snapshot, whose cells the units have; there must be none yet."""
        with self._lock:
            if self._desks or self.units is None:
                raise StorageError("a snapshot can only be restored into a queue that is empty, to its units")
            self._leases, self._bases = leases, dict(bases)
            desks = [PlacedDesk(store, self._clock, self._rouse, self.units) for store in stores]
            self._desks = {desk.store.name: desk for desk in desks}
            for desk in desks:
                desk.rehome()

    def leave(self, session: int, lost: bool) -> None:
        """End a session and give back its leases; attempts count if the client was lost."""
        with self._lock:
            self._sessions.discard(session)
            unit = None if self.units is None else self.units.leave(session)
            for desk in self._desks.values():
                desk.leave(session, lost)
                if unit is not None and isinstance(desk, PlacedDesk):
                    if lost:
                        log.error("a storage unit has died: cells of table %r are lost with it", desk.store.name)
                    desk.lose(unit)
            if unit is not None:
                self._tell_status()
            self._flows = {key: flow for key, flow in self._flows.items() if flow.session != session}

    def submit(self, session: int, request: wire.Request, batch: Batch | None, answer: Answer) -> Ticket:
        """Answer a request now, or park it; the batch becomes the controller's."""
        if self._journal is not None:
            answer = self._journal.answered(answer)
        ticket = Ticket(session, request, answer, batch, since=self._clock())
        with self._lock:
            try:
                outcome = self._handle(ticket)
            except StorageError as error:
                outcome = error
            if outcome is not None:
                ticket.settle(outcome)
            if self._journal is not None and not self._closed and self._journal.due(self._living):
                self._begin_anew(self._journal)
        return ticket

    def cancel(self, ticket: Ticket) -> None:
        """End the wait of a request with WaitTimeout, if it has not been answered."""
        with self._lock:
            if ticket.open and isinstance(ticket.request, wire.AskStatus):
                self._settle_status(ticket)
            elif ticket.open:
                ticket.settle(WaitTimeout(self._awaited(ticket)))

    def close(self) -> None:
        """End every wait with QueueClosed and let all rows go; idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._wake(lambda: QueueClosed("the queue was closed"))
            for ticket, _ in self._askers:
                ticket.settle(QueueClosed("the queue was closed"))
            self._desks.clear()
            self._flows.clear()
            self._alarm.notify()
        if threading.current_thread() is not self._watch:
            self._watch.join()
        # A snapshot that was asked for before is complete, and answered, when the queue is over.
        self._writer.shutdown()
        if self._spill is not None:
            self._spill.close()
        if self._journal is not None:
            self._journal.close()

    @property
    def placed(self) -> bool:
        """Whether cells are held by units."""
        return self.units is not None

    @property
    def closed(self) -> bool:
        """Whether the queue is over."""
        return self._closed

    # Requests

    def _handle(self, ticket: Ticket) -> Outcome | None:
        request = ticket.request
        if self._closed:
            raise QueueClosed("the queue is closed")
        if self._failed is not None and not isinstance(request, wire.AskStatus | wire.AskLedger | wire.Bye):
            raise QueueFailed(self._failed)
        match request:
            case wire.Put() | Admit():
                return self._desk(request.table).put(ticket, request)
            case wire.Next():
                flow = self._flow(request.stream)
                return flow.desk.next(ticket, flow)
            case wire.OpenStream() | wire.CloseStream():
                return self._stream(request, ticket.session)
            case wire.Done() | wire.Release() | wire.Extend() | wire.Drop() | wire.Write():
                return self._under_lease(request, ticket.batch)
            case Attach() | Freed() | Written() | AskUnits() | Grown() | Mirrored() | Spilled():
                return self._placed(ticket, request)
            case Locate() | Watch() | Note():
                return self._desk(request.table).handle(request, None)
            case wire.Read() | wire.DeclareTask() | wire.AddColumns():
                return self._desk(request.table).handle(request, None)
            case wire.Commit() | wire.Rewind() | wire.Reset() | wire.Seal():
                return self._desk(request.table).handle(request, None)
            case wire.AskStatus() if self.units is not None:
                return self._await_status(ticket, self.units)
            case wire.Snapshot():
                self._snapshot(ticket, request)
                return None
            case _:
                return self._administer(request)

    def _placed(self, ticket: Ticket, request: _Unit) -> Outcome | None:
        """Answer what only a queue with storage units is asked."""
        if self.units is None:
            raise StorageError("this queue has no storage units: it holds all cells itself")
        match request:
            case Attach(url):
                self.units.attach(ticket.session, url, ticket.answer)
                for desk in self._desks.values():
                    if isinstance(desk, PlacedDesk):
                        self.units.tell(self.units.number(ticket.session), desk.store.shape)
                        desk.rehome()
                return None
            case Freed():
                self.units.freed(self.units.number(ticket.session))
                if request.table in self._desks:
                    self._placed_desk(request.table).freed(request, ticket.session)
                self._tell_status()
                return OK
            case Spilled():
                self.units.spilled(self.units.number(ticket.session), request)
                return OK
            case AskUnits():
                return UnitList(self.units.urls, self.units.best()), None
        desk = self._placed_desk(request.table)
        return desk.written(ticket, request) if isinstance(request, Written) else desk.told(request, ticket.session)

    def _placed_desk(self, table: str) -> PlacedDesk:
        desk = self._desk(table)
        if not isinstance(desk, PlacedDesk):
            raise StorageError(f"table {table!r} has no storage units")
        return desk

    def _await_status(self, ticket: Ticket, units: Units) -> Outcome | None:
        """Answer once the units have freed all that has gone by now, so that bytes and rows are of one moment."""
        if units.reached(marks := units.marks):
            return self._administer(ticket.request)
        self._askers.append((ticket, marks))
        return None

    def _tell_status(self) -> None:
        """Answer those who wait for the units to have freed what had gone."""
        waiting, self._askers = self._askers, []
        for ticket, marks in waiting:
            if self.units is None or self.units.reached(marks):
                self._settle_status(ticket)
            elif ticket.open:
                self._askers.append((ticket, marks))

    def _settle_status(self, ticket: Ticket) -> None:
        try:
            ticket.settle(self._administer(ticket.request))
        except StorageError as error:
            ticket.settle(error)

    def _under_lease(
        self, request: wire.Done | wire.Release | wire.Extend | wire.Drop | wire.Write, batch: Batch | None
    ) -> Outcome:
        if request.table not in self._desks and request.table in self._bases and request.lease is not None:
            raise LeaseLost(f"lease {request.lease}: table {request.table!r} was dropped")
        return self._desk(request.table).handle(request, batch)

    def _administer(self, request: wire.Request) -> Outcome:
        match request:
            case wire.CreateTable():
                return self._create(request)
            case wire.Find():
                return self._find(request), None
            case wire.OpenTable():
                return wire.TableInfo(self._desk(request.table).store.schema.columns), None
            case wire.DropTable():
                self._drop(request.table)
            case wire.AskLedger():
                return wire.Ledgered(self._desk(request.table).store.counts()), None
            case wire.AskStatus(table=None):
                return wire.Status(queue=self._status()), None
            case wire.AskStatus(table=str(table)):
                return wire.Status(table=self._desk(table).status()), None
            case wire.Fail():
                self._failed = request.report
                self._wake(lambda: QueueFailed(request.report))
        return OK

    def _create(self, request: wire.CreateTable) -> Outcome:
        schema, limits = Schema(request.columns), Limits(request.max_rows, request.max_bytes, request.replicas)
        if request.table not in self._desks:
            self._desks[request.table] = self._made(request.table, schema, limits)
        store = self._desks[request.table].store
        if (store.schema, store.limits) != (schema, limits):
            raise SchemaError(f"table {request.table!r} exists with {store.schema} and {store.limits}")
        return wire.TableInfo(schema.columns), None

    def _made(self, table: str, schema: Schema, limits: Limits) -> Desk:
        base = self._bases.get(table, 0)
        if not 1 <= limits.replicas <= (1 if self.units is None else 2):
            raise SchemaError(f"table {table!r}: replicas are 1, or 2 in a queue with storage units")
        if self.units is None:
            store = Store(table, schema, limits, base, self._leases, self._spill)
            if self._journal is not None:
                scribe = self._journal.scribe(table)
                scribe.before(effect.Created(schema.columns, limits.rows, limits.bytes))
                store.record(scribe)
            return Desk(store, self._clock, self._rouse)
        placed = PlacedStore(table, schema, limits, base, self._leases, self.units)
        return PlacedDesk(placed, self._clock, self._rouse, self.units)

    def _drop(self, table: str) -> None:
        desk = self._desk(table)
        desk.store.ledger.scribe.before(effect.Ended())
        del self._desks[table]
        # A table of the same name goes on counting: ids of rows are never used again.
        self._bases[table] = desk.store.ledger.stop
        desk.close(lambda: QueueClosed(f"table {table!r} was dropped"))

    def _find(self, request: wire.Find) -> wire.Found:
        ledger = self._desk(request.table).store.ledger
        rows = ledger.find(None if request.groups is None else wire.unpack(request.groups))
        written = ledger.written(rows).view(np.int64)
        return wire.Found(wire.pack(rows), wire.pack(ledger.groups.ids(rows)), wire.pack(written))

    def _stream(self, request: wire.OpenStream | wire.CloseStream, session: int) -> Outcome:
        if isinstance(request, wire.OpenStream):
            flow = self._desk(request.table).open(next(self._ids), request, session)
            self._flows[flow.id] = flow
            return wire.Opened(flow.id), None
        if request.stream in self._flows:
            flow = self._flows.pop(request.stream)
            flow.desk.end(flow, counted=False)
        return OK

    # Snapshots

    def _snapshot(self, ticket: Ticket, request: wire.Snapshot) -> None:
        """Take a cut, and have it written."""
        folder = Path(request.folder)
        if not folder.is_absolute():
            raise StorageError(f"a snapshot needs the whole path of its folder, not {request.folder!r}")
        self._expire()
        if self._journal is not None and folder.resolve() == self._journal.folder:
            self._turn(self._journal, ticket)
        elif self.units is not None and self.units.urls:
            cut = self._cut()
            self.units.broadcast(Cut(cut.lease))
            self._writer.submit(self._write, ticket, folder, partial(_collect, cut, self.units, folder))
        else:
            self._writer.submit(self._write, ticket, folder, partial(snapshot.write, self._cut(), folder))

    def _cut(self) -> snapshot.Cut:
        tables = [desk.store.cut() for desk in self._desks.values()]
        return snapshot.Cut(tables, dict(self._bases), next(self._leases))

    def _turn(self, journal: Journal, ticket: Ticket | None) -> None:
        """Have the journal begin anew, from a base that is written now."""
        kept = [(name, each) for name, desk in self._desks.items() for each in desk.store.ledger.kept()]
        number = journal.turn(kept)
        self._writer.submit(self._write, ticket, journal.folder, partial(journal.compact, self._cut(), number))

    def _begin_anew(self, journal: Journal) -> None:
        try:
            self._turn(journal, None)
        except StorageError as error:
            log.warning("the journal goes on growing: %s", error)

    def _write(self, ticket: Ticket | None, folder: Path, write: Callable[[], None]) -> None:
        outcome: Outcome = OK
        try:
            write()
        except StorageError as error:
            outcome = error
        except Exception as error:
            # A border of the process: nobody else would learn of it.
            log.exception("a snapshot could not be written")
            outcome = StorageError(f"no snapshot was written to {folder}: {type(error).__name__}: {error}")
        with self._lock:
            if self.units is not None:
                self.units.broadcast(Cut(0))
            if ticket is not None:
                ticket.settle(outcome)
            elif isinstance(outcome, StorageError):
                log.warning("the journal goes on growing: %s", outcome)

    def _relieved(self) -> None:
        for desk in self._desks.values():
            desk.relieved()

    def _living(self) -> int:
        return sum(desk.store.nbytes for desk in self._desks.values())

    def _disk_failed(self, report: str) -> None:
        """End the queue for everybody: what is in memory can be promised no longer."""
        with self._lock:
            self._failed = report
            self._wake(lambda: QueueFailed(report))

    # Leases that expire

    def tick(self) -> None:
        """Take back every lease whose time is up."""
        with self._lock:
            self._expire()

    def _expire(self) -> None:
        expiries = [desk.expire() for desk in self._desks.values()]
        self._watched = min((expiry for expiry in expiries if expiry is not None), default=None)

    def _rouse(self, expiry: float | None) -> None:
        """Wake the watch if a lease expires before the time that it sleeps until."""
        if expiry is not None and (self._watched is None or expiry < self._watched):
            self._alarm.notify()

    def _watch_leases(self) -> None:
        with self._lock:
            while not self._closed:
                self._expire()
                self._alarm.wait(None if self._watched is None else max(0.0, self._watched - self._clock()))

    # Answers

    def _desk(self, table: str) -> Desk:
        if table not in self._desks:
            raise SchemaError(f"no table {table!r}; tables: {', '.join(self._desks) or 'none'}")
        return self._desks[table]

    def _flow(self, stream: int) -> Flow:
        if stream not in self._flows:
            raise QueueClosed("the stream was closed")
        return self._flows[stream]

    def _status(self) -> QueueStatus:
        tables = {name: desk.status() for name, desk in self._desks.items()}
        units = {} if self.units is None else self.units.sizes
        clients = max(0, len(self._sessions) - 1 - len(units))
        memory = {} if self.units is None else self.units.memory
        if self._spill is not None:
            memory[""] = self._spill.status
        return QueueStatus(tables, len(self._flows), clients, self._failed, units, memory)

    def _wake(self, error: Callable[[], StorageError]) -> None:
        for desk in self._desks.values():
            desk.wake(error)

    def _awaited(self, ticket: Ticket) -> str:
        """Say what a request waited for."""
        if isinstance(ticket.request, wire.Next):
            flow = self._flow(ticket.request.stream)
            return flow.desk.rows_awaited(flow)
        if isinstance(ticket.request, wire.Put | Admit) and ticket.intake is not None:
            return self._desk(ticket.request.table).room_awaited(ticket.intake)
        if isinstance(ticket.request, wire.Snapshot):
            return f"the snapshot in {ticket.request.folder} is still being written, and goes on without its asker"
        return f"{type(ticket.request).__name__} was not answered in time"


def _collect(cut: snapshot.Cut, units: Units, folder: Path) -> None:
    """Write a snapshot of what units hold."""
    from asyncflow.storage.moving import collected  # brings the sockets

    with collected(cut, list(units.urls.values()), units.keys) as whole:
        snapshot.write(whole, folder)
