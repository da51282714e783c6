"""One table and those who wait at it: puts for room, streams for rows.

A request is answered at once, or parked and answered by whatever completes it. Rows and readiness change in the
same call in which parked requests are looked at again, so there is no moment between test and wait in which a
notice could be lost. Nothing here blocks; the caller holds the controller's lock.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from msgspec.structs import replace

from asyncflow.errors import QueueClosed, SchemaError, StorageError
from asyncflow.storage import wire
from asyncflow.storage.batch import Batch
from asyncflow.storage.intake import Arrival, Intake
from asyncflow.storage.ledger import Grant, listed
from asyncflow.storage.orders import Admit
from asyncflow.storage.sampler import BLOCKED, LEASED, READY, Wish
from asyncflow.storage.schema import IDENTITY, Schema
from asyncflow.storage.spec import TaskSpec
from asyncflow.storage.status import Holding, TableStatus, Wait
from asyncflow.storage.store import Store
from asyncflow.storage.ticket import Outcome, Ticket

T = TypeVar("T")

OK = wire.Ok(), None
_SHOWN = 8
"""Rows of a lease that a status names."""


@dataclass(frozen=True, slots=True, eq=False)
class Flow:
    """An open stream: what one consumer of a task asks for."""

    id: int
    desk: "Desk"
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
        step = "" if self.wish.ranks is None else f" for a step of {self.wish.ranks} ranks"
        return f"{self.wish.groups if self.wish.rows is None else self.wish.rows} {kind}{step}"


class Desk:
    """Answers the requests about one table."""

    def __init__(self, store: Store, clock: Callable[[], float], rouse: Callable[[float | None], None]) -> None:
        """Tell `rouse` of the next lease to expire whenever that may have changed."""
        self.store = store
        self._clock, self._rouse = clock, rouse
        self._puts: list[Ticket] = []
        self._nexts: list[tuple[Ticket, Flow]] = []
        self._flows: dict[int, Flow] = {}
        self._closed: Callable[[], StorageError] | None = None

    @property
    def _waiting(self) -> list[Ticket]:
        return [*self._puts, *(ticket for ticket, _ in self._nexts)]

    # Requests

    def handle(self, request: wire.Request, batch: Batch | None) -> Outcome:
        """Answer a request that never waits."""
        match request:
            case wire.Write():
                self._write(request, needed(batch))
            case wire.Read():
                return wire.Ok(), self.store.find(wire.unpack(request.rows), request.columns)
            case wire.Done() | wire.Release() | wire.Extend() | wire.Drop():
                self._settle(request)
            case wire.DeclareTask():
                self._declare(request)
            case wire.AddColumns():
                self.store.widen(request.columns)
                return wire.TableInfo(self.store.schema.columns), None
            case _:
                self._govern(request)
        self.advance()
        return OK

    def put(self, ticket: Ticket, request: wire.Put | Admit) -> Outcome | None:
        """Admit rows, or let the put wait for room."""
        if ticket.intake is None:
            ticket.intake = self._arrive(ticket, request)
            ticket.batch = None
        if self.store.ledger.sealed:
            raise QueueClosed(f"table {self.store.name!r} is sealed: it takes no new rows")
        # First come first: a small put does not overtake a large one that waits for room.
        self._puts = [each for each in self._puts if each.open]
        if self._puts or not self.store.fits(ticket.intake):
            self._puts.append(ticket)
            return None
        ticket.settle((self._admit(ticket), None))
        self.advance()
        return None

    def _arrive(self, ticket: Ticket, request: wire.Put | Admit) -> Arrival:
        if isinstance(request, Admit):
            raise SchemaError(f"the cells of table {self.store.name!r} are held here: put them here")
        return self.store.intake(needed(ticket.batch), request.repeat, request.put_id)

    def _admit(self, ticket: Ticket) -> wire.Reply:
        assert isinstance(ticket.intake, Intake)
        return wire.Rows(wire.pack(self.store.admit(ticket.intake)))

    def next(self, ticket: Ticket, flow: Flow) -> Outcome | None:
        """Hand out the next batch of a stream, or let it wait for one."""
        if self._closed is not None:
            raise self._closed()
        # What comes back by its time goes to those who have waited longer.
        self.expire()
        outcome = self._form(flow)
        if outcome is None:
            self._nexts.append((ticket, flow))
        self.advance()
        return outcome

    def _write(self, request: wire.Write, batch: Batch) -> None:
        rows = wire.unpack(request.rows)
        if request.lease is not None:
            self.store.ledger.covers(request.lease, rows, self._clock())
        self.store.write(rows, batch)

    def _settle(self, request: wire.Done | wire.Release | wire.Extend | wire.Drop) -> None:
        ledger, now = self.store.ledger, self._clock()
        match request:
            case wire.Done():
                ledger.finish(request.lease, now, request.step)
            case wire.Release():
                ledger.release(request.lease, now, request.failed)
            case wire.Extend():
                ledger.extend(request.lease, request.seconds, now)
                self._rouse(ledger.next_expiry())
            case wire.Drop():
                if request.lease is not None:
                    ledger.covers(request.lease, wire.unpack(request.rows), now)
                ledger.drop(wire.unpack(request.rows), request.reason)

    def _govern(self, request: wire.Request) -> None:
        ledger = self.store.ledger
        match request:
            case wire.Commit():
                ledger.commit(request.task, request.step)
            case wire.Rewind():
                ledger.rewind(request.task, request.step)
            case wire.Reset():
                ledger.reset(request.task)
            case wire.Seal():
                ledger.seal()
                for ticket in self._puts:
                    ticket.settle(QueueClosed(f"table {self.store.name!r} was sealed"))

    def _declare(self, request: wire.DeclareTask) -> None:
        spec = TaskSpec(
            tuple(request.reads),
            request.sampler,
            request.max_attempts,
            request.lease_seconds,
            request.durable,
            request.choice,
            request.repairs,
        )
        self.store.declare(request.task, spec)

    # Streams

    def open(self, stream: int, request: wire.OpenStream, session: int) -> Flow:
        """Open a stream; those of one task that is divided over ranks must ask for the same steps."""
        wish = Wish(
            request.rows, request.groups, request.partial, request.whole, request.rank, request.ranks, request.split
        )
        task = self.store.ledger.task(request.task)
        if not task.sampler.accepts(wish):
            raise SchemaError(f"task {task.name!r} samples by {task.spec.sampler!r}: it cannot give {wish}")
        if (wish.rows or wish.groups or 1) < 1 or 0 in (wish.rows, wish.groups) or None not in (wish.rows, wish.groups):
            raise SchemaError(f"a batch has at least one row or group, and a number of either: {wish}")
        if wish.ranks is None and (wish.rank or wish.split):
            raise SchemaError(f"rank and split are for a task that is divided over ranks: {wish}")
        for flow in self._flows.values():
            if flow.task == task.name and wish.ranks is not None and not _agree(flow.wish, wish):
                raise SchemaError(f"the ranks of task {task.name!r} share their steps: {flow.wish} is open, not {wish}")
        flow = self._flows[stream] = Flow(stream, self, task.name, wish, session, request.consumer)
        return flow

    def end(self, flow: Flow, counted: bool) -> None:
        """End a stream and give back its leases."""
        del self._flows[flow.id]
        for ticket, waiting in self._nexts:
            if waiting is flow:
                ticket.settle(QueueClosed("the stream was closed"))
        self.store.ledger.abandon(flow.id, counted)
        self.advance()

    # What completes a wait

    def _form(self, flow: Flow) -> Outcome | None:
        """Form the next batch of a stream, or tell its end; None if it has to wait."""
        ledger = self.store.ledger
        grant = ledger.lease(flow.task, flow.wish, self._clock(), flow.id)
        if grant is None:
            return (wire.End(), None) if ledger.exhausted(flow.task, flow.id, flow.wish) else None
        self._rouse(ledger.next_expiry())
        columns = dict.fromkeys((*ledger.task(flow.task).spec.reads, *IDENTITY))
        leased = wire.Leased(grant.id, wire.pack(grant.rows), grant.attempt)
        if grant.part is not None:
            leased.step, leased.part, leased.parts = grant.part.step, grant.part.number, grant.part.count
        return self._leased(leased, grant, list(columns))

    def _leased(self, leased: wire.Leased, grant: Grant, columns: list[str]) -> Outcome:
        return leased, self.store.find(grant.rows, columns)

    # What cannot be recorded fails who waits for it, not whose request brought it about.

    def _formed(self, flow: Flow) -> Outcome | None:
        try:
            return self._form(flow)
        except StorageError as error:
            return error

    def _admitted(self, ticket: Ticket) -> Outcome:
        try:
            return self._admit(ticket), None
        except StorageError as error:
            return error

    def advance(self) -> None:
        """Free what went, let waiting puts in, and hand out what became ready, the oldest request first."""
        self.store.ledger.expire(self._clock())
        self.store.sweep()
        self._puts = [ticket for ticket in self._puts if ticket.open]
        while self._puts and self.store.fits(needed(self._puts[0].intake)):
            ticket = self._puts.pop(0)
            ticket.settle(self._admitted(ticket))
            self.store.sweep()
        for ticket, flow in self._nexts:
            if ticket.open:
                outcome = self._formed(flow)
                if outcome is not None:
                    ticket.settle(outcome)
        self._nexts = [(ticket, flow) for ticket, flow in self._nexts if ticket.open]

    def relieved(self) -> None:
        """Hear that puts may fit that did not."""
        if self._puts:
            self.advance()

    def expire(self) -> float | None:
        """Take back every lease whose time is up; return when the next one may be."""
        if self.store.ledger.expire(self._clock()):
            self.advance()
        return self.store.ledger.next_expiry()

    def close(self, error: Callable[[], StorageError]) -> None:
        """Answer everything that waits with an error, and every later request for rows; free all memory."""
        self._closed = error
        self.wake(error)
        self.store.clear()
        # Streams that are open still lead here.
        self.store = Store(self.store.name, Schema({}), self.store.limits)

    def wake(self, error: Callable[[], StorageError]) -> None:
        """Answer everything that waits with an error."""
        for ticket in self._waiting:
            ticket.settle(error())
        self._puts, self._nexts = [], []

    def leave(self, session: int, lost: bool) -> list[int]:
        """End what a session waits for and its streams, which are returned; attempts count if it was lost."""
        for ticket in self._waiting:
            if ticket.session == session:
                ticket.settle(QueueClosed("the client has left"))
        gone = [flow for flow in self._flows.values() if flow.session == session]
        for flow in gone:
            self.end(flow, counted=lost)
        return [flow.id for flow in gone]

    # Words

    def status(self) -> TableStatus:
        """Return what the table holds, how its tasks stand, who has which leases for how long, and who waits."""
        status, now = self.store.status(sum(ticket.open for ticket in self._puts)), self._clock()
        tasks = {}
        for name, counts in status.tasks.items():
            since = self.store.ledger.oldest_lease(name)
            tasks[name] = replace(counts, oldest_lease=None if since is None else now - since)
        waits = [*self._puts_waiting(now), *self._streams_waiting(now)]
        return replace(status, tasks=tasks, waits=waits, holdings=[*self._holdings(now)])

    def _holdings(self, now: float) -> Iterator[Holding]:
        for grant, rows in self.store.ledger.held():
            flow = self._flows.get(grant.holder)
            consumer = "" if flow is None else flow.consumer
            yield Holding(grant.task, consumer, len(rows), rows[:_SHOWN].tolist(), now - grant.since)

    def _puts_waiting(self, now: float) -> Iterator[Wait]:
        for ticket in self._puts:
            if ticket.open and ticket.intake is not None:
                room = f"room for {ticket.intake.rows} rows and {ticket.intake.nbytes} bytes"
                yield Wait(room, now - ticket.since, ticket.session)

    def _streams_waiting(self, now: float) -> Iterator[Wait]:
        missing: dict[str, list[str]] = {}
        for ticket, flow in self._nexts:
            if ticket.open:
                if flow.task not in missing:
                    missing[flow.task] = self._lacking(flow.task)
                waited = now - ticket.since
                yield Wait(flow.wanted, waited, ticket.session, flow.task, flow.consumer, missing[flow.task])

    def _lacking(self, task: str) -> list[str]:
        """Return the columns that the oldest blocked rows of a task lack; a status looks at no more than these."""
        ledger = self.store.ledger
        return self.store.missing(ledger.blocked(task)[:1024], ledger.task(task).need)

    def rows_awaited(self, flow: Flow) -> str:
        """Say which rows a stream waited for."""
        ledger = self.store.ledger
        task = ledger.task(flow.task)
        counts = f"{task.counts[READY]} ready, {task.counts[LEASED]} leased, {task.counts[BLOCKED]} blocked"
        blocked = ledger.blocked(flow.task)
        missing = self.store.missing(blocked, task.need)
        lacking = f"; {listed(blocked)} without {', '.join(missing)}" if missing else ""
        who = f" (consumer {flow.consumer!r})" if flow.consumer else ""
        return f"table {self.store.name!r}, task {task.name!r}{who}: waited for {flow.wanted}; {counts}{lacking}"

    def room_awaited(self, intake: Arrival) -> str:
        """Say what room a put waited for."""
        pressed = self.store.pressed(intake)
        if pressed:
            return f"table {self.store.name!r}: a put of {intake.rows} rows and {intake.nbytes} bytes waited: {pressed}"
        status, limits = self.status(), self.store.limits
        tasks = "; ".join(
            f"task {name!r}: {task.waiting} ready, {task.leased} leased, {task.blocked} blocked"
            for name, task in status.tasks.items()
        )
        return (
            f"table {self.store.name!r}: a put of {intake.rows} rows and {intake.nbytes} bytes waited for room; it "
            f"holds {status.rows} rows and {status.bytes} bytes, at most {limits.rows} rows and {limits.bytes} "
            f"bytes; {tasks or 'no tasks: nothing ever leaves'}"
        )


def needed(value: T | None) -> T:
    """Return what a request must have."""
    if value is None:
        raise SchemaError("the request needs a batch")
    return value


def _agree(one: Wish, other: Wish) -> bool:
    return (one.rows, one.groups, one.ranks, one.split) == (other.rows, other.groups, other.ranks, other.split)
