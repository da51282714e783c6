"""The link of a client to a queue with storage units: control messages go to the controller, cells to the units.

To its users it is a link like any other. A put is one request, to a unit; a get two, to the controller and to the
units that hold its rows; a write of rows whose places are not known asks for them first. What goes to a unit that
there is no connection to yet waits for that, and holds up nothing else.
"""

import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial

import numpy as np

from asyncflow.errors import (
    LeaseLost,
    QueueClosed,
    RowGone,
    SchemaError,
    StorageError,
    UnitLost,
    WaitTimeout,
    WireError,
)
from asyncflow.storage import wire
from asyncflow.storage.arena import Writer
from asyncflow.storage.batch import Batch
from asyncflow.storage.keys import Folder
from asyncflow.storage.link import AGAIN, AGAIN_AT_MOST, GRACE, SLACK, Pending
from asyncflow.storage.memory import keep
from asyncflow.storage.orders import Fetch, Locate, Measured, Note, Placed, Places, Stage, Watch
from asyncflow.storage.remote import RemoteLink
from asyncflow.storage.roster import Roster, Visit
from asyncflow.storage.spec import Trait
from asyncflow.storage.ticket import Outcome
from asyncflow.storage.traits import measure
from asyncflow.types import Int64s

# Leases whose places are remembered, for writes under them.
_REMEMBERED = 4096


class Steps(Pending):
    """The answer to a request that takes several, one after another; to cancel it cancels those that wait."""

    __slots__ = ("_lock", "_steps", "cancelled", "pause")

    def __init__(self, peer: str) -> None:
        super().__init__(peer)
        self._lock = threading.Lock()
        self._steps: list[Callable[[], None]] = []
        self.cancelled = False
        self.pause = AGAIN
        """Seconds until it is asked again, if it must be."""
        self.cancel = self._cancel

    def step(self, cancel: Callable[[], None]) -> None:
        """Hear how one of them is cancelled."""
        with self._lock:
            self._steps.append(cancel)
            late = self.cancelled
        if late:
            cancel()

    def _cancel(self) -> None:
        with self._lock:
            self.cancelled = True
            steps = list(self._steps)
        for cancel in steps:
            cancel()


class Scattered:
    """The parts of a batch that came from several units; joined by whoever takes the answer."""

    def __init__(self, parts: list[Batch], at: Int64s) -> None:
        self._parts, self._at = parts, at

    def gather(self) -> Batch:
        """Return the rows in the order of the request."""
        order = np.argsort(self._at, kind="stable")
        joined = Batch.concat(self._parts)
        return joined.take(np.argsort(order)) if np.any(order[1:] < order[:-1]) else joined


class ClusterLink:
    """A connection to a controller and to its units."""

    def __init__(
        self, control: RemoteLink, timeout: float, keys: Folder | None = None, encrypt_bulk: bool = False
    ) -> None:
        self.url = control.url
        self._control, self._timeout, self._keys = control, timeout, keys
        self._encrypt_bulk = encrypt_bulk
        self._lock = threading.Lock()
        self._tables: dict[int, str] = {}
        """The table of each stream."""
        self._leases: OrderedDict[int, tuple[Int64s, Places]] = OrderedDict()
        # What must wait for an answer before it can go on, so that no thread that brings answers does.
        self._hands = ThreadPoolExecutor(2, "asyncflow-cluster")
        control.attend()
        try:
            self._roster = Roster(control, timeout, self._connect)
        except StorageError:
            control.close()
            raise

    # Requests

    def send(self, request: wire.Request, batch: Batch | None = None) -> Pending:
        """Send a request to whom it concerns; see `Link.send` on the memory of the batch."""
        match request:
            case wire.Put() if batch is not None:
                return self._put(request, batch)
            case wire.Write() if batch is not None:
                return self._write(request, batch)
            case wire.Read() | wire.Next():
                return self._get(request)
            case wire.DeclareTask() if request.choice.traits:
                return self._later(partial(self._declare, request))
            case wire.OpenStream():
                return self._open(request)
            case wire.CloseStream():
                self._tables.pop(request.stream, None)
            case wire.Done() | wire.Release():
                self._leases.pop(request.lease, None)
        return self._control.send(request, batch)

    def _put(self, request: wire.Put, batch: Batch) -> Pending:
        pending = Steps(self._control.peer)

        def hear(outcome: Outcome) -> None:
            if not isinstance(outcome, StorageError) and isinstance(outcome[0], wire.Rows):
                self._roster.best = outcome[0].unit
            pending.complete(outcome)

        number = self._roster.next
        self.ask(pending, number, f"a put to table {request.table!r}", request, hear, batch, anywhere=True)
        return pending

    def ask(
        self,
        pending: Steps,
        number: int,
        what: str,
        request: wire.Request,
        hear: Callable[[Outcome], None],
        batch: Batch | None = None,
        *,
        anywhere: bool = False,
    ) -> None:
        """Send a request to unit `number`, over a connection that may have to be made first; `hear` gets the answer.

        With `anywhere` another unit will do. The request becomes a step of `pending`.
        """

        def go(unit: RemoteLink, batch: Batch | None) -> None:
            pending.peer, pending.grace = f"storage unit {unit.url}, asked for {what},", SLACK
            asked = unit.ask(request, lambda outcome: hear(self._said(unit, outcome)), batch)
            if not isinstance(request, Fetch):  # what is leased already is delivered, also when it is cancelled
                pending.step(asked.cancel)

        unit = self._roster.link(number)
        if unit is not None:
            go(unit, batch)
            return
        # Whoever sends it may go on and change it.
        mine = None if batch is None else batch.copy()
        visit = Visit(what, lambda unit: go(unit, mine), hear, anywhere=anywhere)
        pending.step(visit.cancel)
        self._roster.reach(number, visit)

    def _said(self, unit: RemoteLink, outcome: Outcome) -> Outcome:
        """Return an answer of a unit, or that it is lost though the queue is not."""
        if isinstance(outcome, QueueClosed) and unit.ended is not None and self.open:
            return UnitLost(*outcome.args)
        return outcome

    def _open(self, request: wire.OpenStream) -> Pending:
        pending = Steps(self._control.peer)

        def hear(outcome: Outcome) -> None:
            if not isinstance(outcome, StorageError) and isinstance(outcome[0], wire.Opened):
                self._tables[outcome[0].stream] = request.table
            pending.complete(outcome)

        pending.step(self._control.ask(request, hear).cancel)
        return pending

    # Reading

    def _get(self, request: wire.Read | wire.Next, pending: Steps | None = None) -> Steps:
        pending = pending or Steps(self._control.peer)
        pending.peer, pending.grace = self._control.peer, GRACE
        pending.step(self._control.ask(request, partial(self._found, request, pending)).cancel)
        return pending

    def _found(self, request: wire.Read | wire.Next, pending: Steps, outcome: Outcome) -> None:
        """Go on to the units that hold what was asked for."""
        if isinstance(outcome, StorageError) or not isinstance(outcome[0], wire.Leased | Placed):
            pending.complete(outcome)
            return
        reply = outcome[0]
        hold, places = (reply.lease, reply.places) if isinstance(reply, wire.Leased) else (reply.hold, reply.places)
        if places is None:
            pending.complete(outcome)
            return
        if isinstance(reply, wire.Leased):
            self._remember(reply, places)
        table = request.table if isinstance(request, wire.Read) else self._tables.get(request.stream)
        _Fetching(self, request, pending, reply, places).start(hold, f"cells of table {table!r}")

    def again(self, request: wire.Next | wire.Read, pending: Steps, reply: wire.Reply) -> None:
        """Give back what could not be fetched, and ask anew, when the controller may have heard of it."""
        self.give_back(request, reply)
        self._hands.submit(self._get_later, request, pending)

    def _get_later(self, request: wire.Next | wire.Read, pending: Steps) -> None:
        time.sleep(pending.pause)
        pending.pause = min(2 * pending.pause, AGAIN_AT_MOST)
        self._get(request, pending)

    def give_back(self, request: wire.Next | wire.Read, reply: wire.Reply) -> None:
        """Give a lease back whose cells could not be fetched."""
        if isinstance(reply, wire.Leased) and isinstance(request, wire.Next) and request.stream in self._tables:
            self._leases.pop(reply.lease, None)
            self._control.send(wire.Release(self._tables[request.stream], reply.lease))

    def _remember(self, leased: wire.Leased, places: Places) -> None:
        with self._lock:
            self._leases[leased.lease] = wire.unpack(leased.rows), places
            if len(self._leases) > _REMEMBERED:
                self._leases.popitem(last=False)

    # Writing

    def _write(self, request: wire.Write, batch: Batch) -> Pending:
        rows = wire.unpack(request.rows)
        pending = Steps(self._control.peer)
        at = self._places(request.lease, rows)
        if at is not None:
            return self._stage(pending, request, rows, at, batch)
        mine = keep(batch, self.writer())

        def go_on(outcome: Outcome) -> None:
            if isinstance(outcome, SchemaError) and request.lease is not None:
                pending.complete(LeaseLost(f"lease {request.lease}: {outcome}"))
            elif isinstance(outcome, StorageError) or not isinstance(outcome[0], Placed):
                pending.complete(outcome)
            else:
                self._hands.submit(self._go_on, pending, request, rows, outcome[0].places, mine)

        pending.step(self._control.ask(Locate(request.table, request.rows), go_on).cancel)
        return pending

    def _go_on(self, pending: Steps, request: wire.Write, rows: Int64s, places: Places, batch: Batch) -> None:
        try:
            self._stage(pending, request, rows, _at(places, len(rows)), batch)
        except StorageError as error:
            pending.complete(error)

    def _places(self, lease: int | None, rows: Int64s) -> Int64s | None:
        """Return the unit of each row, if they are under a lease that was fetched here."""
        known = self._leases.get(-1 if lease is None else lease)
        if known is None:
            return None
        held, places = known
        order = np.argsort(held)
        found = np.searchsorted(held[order], rows).clip(max=max(len(held) - 1, 0))
        if not len(held) or np.any(held[order][found] != rows):
            return None
        at: Int64s = _at(places, len(held))[order][found]
        return at

    def _stage(self, pending: Steps, request: wire.Write, rows: Int64s, at: Int64s, batch: Batch) -> Pending:
        units = np.unique(at).tolist()
        if not units:
            pending.complete((wire.Ok(), None))
        write, parts, joint = secrets.token_bytes(16), [], _Joint(pending, len(units))
        for unit in units:
            mine = np.flatnonzero(at == unit)
            packed = request.rows if len(units) == 1 else wire.pack(rows[mine])
            parts.append((unit, Stage(request.table, packed, write, len(units), request.lease), mine))
        # A batch of another length than the rows is left whole, for a unit to say so.
        whole = len(units) == 1 or len(batch) != len(rows)
        what, hear = f"a write to table {request.table!r}", partial(self._staged, joint, request.lease)
        for unit, stage, mine in parts:
            self.ask(pending, unit, what, stage, hear, batch if whole else batch.take(mine))
        return pending

    def _staged(self, joint: "_Joint", lease: int | None, outcome: Outcome) -> None:
        if isinstance(outcome, UnitLost):
            self._forget(lease)
        joint.hear(outcome)

    def _forget(self, lease: int | None) -> None:
        """Ask the controller for the places of a lease the next time: its rows may have moved."""
        # Without the lock: who holds it may wait for the thread that is here, to close its connection.
        self._leases.pop(-1 if lease is None else lease, None)

    # Declaring

    def _later(self, work: Callable[[], Outcome]) -> Pending:
        """Do what needs several answers one after another."""
        pending = Pending(self._control.peer)

        def do() -> None:
            try:
                pending.complete(work())
            except StorageError as error:
                pending.complete(error)

        self._hands.submit(do)
        return pending

    def _declare(self, request: wire.DeclareTask) -> Outcome:
        """Declare a task, after what it chooses by was asked of the units that hold it."""
        for trait in request.choice.traits:
            while (rows := self._unknown(request.table, trait)) is not None:
                self._measure(request.table, rows, trait)
        return self._control.send(request).result(self._timeout)

    def _unknown(self, table: str, trait: Trait) -> bytes | None:
        reply = self._control.send(Watch(table, trait)).result(self._timeout)[0]
        return reply.rows if isinstance(reply, wire.Rows) and reply.rows else None

    def _measure(self, table: str, rows: bytes, trait: Trait) -> None:
        with suppress(RowGone):  # those that are left are asked for again
            batch = self._get(wire.Read(table, rows, [trait[1]])).result(self._timeout)[1]
            if batch is not None:
                told = Measured(trait, measure(trait, batch[trait[1]]).astype("<f8").tobytes())
                self._control.send(Note(table, rows, told)).result(self._timeout)

    # Units

    def _connect(self, url: str, timeout: float) -> RemoteLink:
        link = RemoteLink(url, timeout, self._keys, self._encrypt_bulk)
        link.attend()
        return link

    def writer(self) -> Writer:
        """Return the writer of the unit that the next put goes to."""
        return self._roster.writer()

    @property
    def open(self) -> bool:
        """Whether the controller can be reached."""
        return self._control.ended is None

    def serve(self, url: str, keys: Folder | None = None, encrypt_bulk: bool = False) -> str:
        """Refuse: only the process that holds a queue can serve it."""
        return self._control.serve(url, keys, encrypt_bulk)

    def close(self) -> None:
        """Leave; idempotent."""
        self._control.close()
        self._hands.shutdown()
        self._roster.close()


class _Joint:
    """One answer to several requests: the first error, which cancels the others, or the last answer."""

    def __init__(self, pending: Steps, count: int) -> None:
        self._pending, self._left = pending, count
        self._lock = threading.Lock()

    def hear(self, outcome: Outcome) -> None:
        """Take one of the answers."""
        with self._lock:
            self._left -= 1
            last = self._left == 0
        if isinstance(outcome, StorageError):
            self._pending.complete(outcome)
            self._pending.cancel()
        elif last:
            self._pending.complete(outcome)


class _Fetching:
    """Cells of one request, on their way from the units that hold them."""

    def __init__(
        self,
        link: ClusterLink,
        request: wire.Read | wire.Next,
        pending: Steps,
        reply: wire.Reply,
        places: Places,
    ) -> None:
        self._link, self._request, self._pending, self._reply = link, request, pending, reply
        self._places = places
        self._lock = threading.Lock()
        self._parts: dict[int, Batch] = {}
        self._over = False

    def start(self, hold: int, what: str) -> None:
        """Ask the units."""
        for number in self._places.units:
            self._link.ask(self._pending, number, what, Fetch(hold), partial(self._hear, number))

    def failed(self, error: StorageError) -> None:
        """End with an error, or begin anew where the next lease will do as well."""
        with self._lock:
            over, self._over = self._over, True
        if over:
            return
        cancelled = self._pending.cancelled
        if isinstance(error, LeaseLost | QueueClosed) and not cancelled and self._link.open:
            self._link.again(self._request, self._pending, self._reply)
            return
        self._link.give_back(self._request, self._reply)
        self._pending.complete(WaitTimeout(*error.args) if cancelled else error)

    def _hear(self, number: int, outcome: Outcome) -> None:
        if isinstance(outcome, StorageError):
            self.failed(outcome)
            return
        batch = outcome[1]
        if not isinstance(batch, Batch):
            self.failed(WireError("a unit sent no cells"))
            return
        with self._lock:
            self._parts[number] = batch
            done = len(self._parts) == len(self._places.units) and not self._over
        if done:
            parts = [self._parts[each] for each in self._places.units]
            whole = parts[0] if len(parts) == 1 else Scattered(parts, np.frombuffer(self._places.at, np.uint8))
            self._pending.complete((self._reply, whole))


def _at(places: Places, rows: int) -> Int64s:
    """Return the unit of each row."""
    units = np.array(places.units, np.int64)
    if not places.at:
        return np.repeat(units[:1], rows)
    return units[np.frombuffer(places.at, np.uint8)]
