"""A storage unit: holds cells for a controller that is elsewhere, and serves them to clients.

It asks the controller to admit the rows of each put, and keeps a put until it is told their ids. Answers and orders
of the controller come one after another in one thread, so what they say is done in the order in which it was decided.
"""

import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeAlias

import numpy as np

from asyncflow.errors import LeaseLost, QueueClosed, SchemaError, StorageError, WaitTimeout
from asyncflow.storage import wire
from asyncflow.storage.arena import Arena
from asyncflow.storage.batch import Batch
from asyncflow.storage.intake import Intake, blank, check_write, taken
from asyncflow.storage.keys import Folder
from asyncflow.storage.link import GRACE, Pending
from asyncflow.storage.orders import (
    Admit,
    Admitted,
    Adopt,
    AskUnits,
    Attach,
    Close,
    Copy,
    Cut,
    Entered,
    Fetch,
    Free,
    Freed,
    Grown,
    Hold,
    Lacking,
    Load,
    Measured,
    Mirrored,
    Order,
    Orders,
    Places,
    Promote,
    Shape,
    Spilled,
    Stage,
    Stale,
    Take,
    Taken,
    Unhold,
    UnitList,
    Written,
)
from asyncflow.storage.remote import RemoteLink
from asyncflow.storage.schema import Schema
from asyncflow.storage.server import Server
from asyncflow.storage.spec import Trait
from asyncflow.storage.spill import Spill
from asyncflow.storage.ticket import Answer, Outcome, Ticket
from asyncflow.storage.traits import measure
from asyncflow.storage.unit import Block, Cells, Unit, parts
from asyncflow.types import Int64s

log = logging.getLogger(__name__)

# How long another unit may take to answer.
_PATIENCE = 60.0

_Copy: TypeAlias = tuple[int, Int64s, Batch, Int64s]
"""The unit that is to have it, rows, cells, and the place of each row."""

Then: TypeAlias = Callable[[wire.Reply], None]


@dataclass(frozen=True, slots=True)
class _Parked:
    """A request with cells that waits for memory, and how to go on with it."""

    ticket: Ticket
    nbytes: int
    then: Callable[[], None]


class Shelf:
    """The cells of one table that the unit has."""

    def __init__(self, columns: dict[str, str], base: int, spill: Spill | None = None) -> None:
        self.schema = Schema(columns)
        self.unit = Unit(self.schema.columns, base, spill)
        self.copies = Unit(self.schema.columns, base, spill, spare=True)
        """Cells of rows of other units, in case that these die."""
        self.traits: set[Trait] = set()
        """What the controller has asked for before."""
        self.told = 0
        """Bytes that had gone with dead cells when the controller was last told."""

    def clear(self) -> None:
        """Let all cells go, for good."""
        self.unit.clear()
        self.copies.clear()

    @property
    def saved(self) -> int:
        """Bytes that have gone with dead cells as blocks on the disk were written anew."""
        return self.unit.saved + self.copies.saved

    def shape(self, columns: dict[str, str]) -> None:
        """Have these columns, which only grow in number."""
        more = [name for name in columns if name not in self.schema.columns]
        if more:
            self.schema = Schema(columns)
            self.unit.widen(more)
            self.copies.widen(more)

    @property
    def nbytes(self) -> int:
        """Bytes of all cells."""
        return self.unit.nbytes + self.copies.nbytes

    def fresh(self, rows: Int64s, batch: Batch) -> list[Int64s]:
        """Return for each column the places of the rows without a cell; a CellConflict if one has another value."""
        if not self.unit.knows(rows):  # the controller will tell what is wrong with them
            return [np.arange(len(rows))] * len(batch.names)
        return self.unit.fresh(rows, batch)


class Depot:
    """A storage unit: what its server and its controller ask of it."""

    placed = False

    def __init__(
        self,
        controller: str,
        url: str,
        timeout: float,
        over: threading.Event | None = None,
        keys: Folder | None = None,
        spill: Spill | None = None,
        encrypt_bulk: bool = False,
    ) -> None:
        """Join the queue at `controller`, and serve clients at `url`; `over` is set when the controller is gone."""
        self._spill = spill
        self._parked: list[_Parked] = []
        self._reported: Spilled | None = None
        self._lock = threading.RLock()
        self._shelves: dict[str, Shelf] = {}
        self._holds: dict[int, Cells] = {}
        self._fetches: dict[int, Ticket] = {}
        self._announced = 0
        self._cut = 0
        self._blocks: dict[str, list[Block]] = {}
        self._takes: list[tuple[Ticket, Take]] = []
        self._asked: dict[Ticket, Pending] = {}
        self._mirrors: dict[int, RemoteLink] = {}
        self._keys, self._encrypt_bulk = keys, encrypt_bulk
        # Copies leave in the order in which the cells came.
        self._copier = ThreadPoolExecutor(1, "asyncflow-copies")
        self._sessions = 0
        self._joined = threading.Event()
        self.over = threading.Event() if over is None else over
        self._failure: StorageError | None = None
        self._upstream = RemoteLink(controller, timeout, keys)
        self._arena = Arena()
        try:
            with suppress(OSError):  # without shared memory everything crosses the socket
                self._arena.share()
            self._server = Server(self, url, self._arena, self._arena.writer(self.join()), keys, encrypt_bulk)
        except StorageError:
            self._upstream.close()
            self._arena.close()
            raise
        self.url = self._server.url
        self._upstream.ask(Attach(self.url), self._hear, lasting=True)
        if not self._joined.wait(timeout) or self._failure is not None:
            failure = self._failure or StorageError(f"the queue at {controller} did not take in the unit {self.url}")
            self.close()
            raise failure
        with self._lock:
            if spill is not None:
                spill.start(self._lock, self._relieved)
            self._report()

    def close(self) -> None:
        """Leave; the cells are lost. Idempotent."""
        self._upstream.close()
        self._copier.shutdown(cancel_futures=True)
        for mirror in self._mirrors.values():
            mirror.close()
        self._server.close()
        with self._lock:
            self._shelves.clear()
            self._holds.clear()
        if self._spill is not None:
            self._spill.close()
        self._arena.close()

    # What the server asks

    def join(self) -> int:
        """Open a session."""
        with self._lock:
            self._sessions += 1
            return self._sessions

    def leave(self, session: int, lost: bool) -> None:
        """End a session: what it waits for is taken back."""
        with self._lock:
            self._fetches = {hold: each for hold, each in self._fetches.items() if each.session != session}
            self._parked = [each for each in self._parked if each.ticket.session != session]
            asked = [pending for ticket, pending in self._asked.items() if ticket.session == session]
        for pending in asked:
            pending.cancel()

    def cancel(self, ticket: Ticket) -> None:
        """End the wait of a request: what the controller waits for is ended there."""
        with self._lock:
            pending = self._asked.get(ticket)
            # What is being copied was admitted, and is answered when that has ended.
            if pending is None and isinstance(ticket.request, Fetch | Take):
                self._takes = [each for each in self._takes if each[0] is not ticket]
                self._fetches = {hold: each for hold, each in self._fetches.items() if each is not ticket}
                ticket.settle(LeaseLost("the controller did not tell this unit of what is fetched"))
            elif any(each.ticket is ticket for each in self._parked):
                self._parked = [each for each in self._parked if each.ticket is not ticket]
                ticket.settle(WaitTimeout(f"unit {self.url}: what was put waited: {self._spill}"))
        if pending is not None:
            pending.cancel()

    def submit(self, session: int, request: wire.Request, batch: Batch | None, answer: Answer) -> Ticket:
        """Answer a request now, or park it; the batch becomes the unit's."""
        ticket = Ticket(session, request, answer, batch)
        with self._lock:
            try:
                self._handle(ticket, request)
            except SchemaError:
                # The client may have heard of a table or column before this unit: the controller's answer comes after.
                table = getattr(request, "table", "")
                self._ask(ticket, wire.OpenTable(table), lambda _: self._handle(ticket, request))
            except StorageError as error:
                ticket.settle(error)
        return ticket

    def _handle(self, ticket: Ticket, request: wire.Request) -> None:
        if self._failure is not None:
            raise self._failure
        match request:
            case wire.Put():
                shelf, batch = self._shelf(request.table), _given(ticket.batch)
                intake = taken(shelf.schema, batch, request.repeat, request.put_id)
                self._enter(_Parked(ticket, intake.nbytes, lambda: self._admit(ticket, request.table, intake)))
            case Stage():
                rows, batch = wire.unpack(request.rows), _given(ticket.batch)
                check_write(self._shelf(request.table).schema, rows, batch)
                self._write(ticket, request, rows, batch)
            case Fetch():
                self._fetch(ticket, request.hold)
            case Take():
                self._take(ticket, request)
            case Load():
                batch = _given(ticket.batch)
                parked = _Parked(ticket, batch.nbytes, lambda: self._loaded(ticket, request, batch))
                # A put waits for its copy: it was let in already, where it came to.
                if request.copy:
                    parked.then()
                else:
                    self._enter(parked)
            case _:
                raise StorageError(f"a storage unit does not answer {type(request).__name__}: ask the controller")

    def _shelf(self, table: str) -> Shelf:
        if table not in self._shelves:
            raise SchemaError(f"no table {table!r}")
        return self._shelves[table]

    # What this asks the controller

    def _ask(self, ticket: Ticket, request: wire.Request, then: Then) -> None:
        self._asked[ticket] = self._upstream.ask(request, partial(self._answered, ticket, then))

    def _answered(self, ticket: Ticket, then: Then, outcome: Outcome) -> None:
        with self._lock:
            self._asked.pop(ticket, None)
            try:
                if isinstance(outcome, StorageError):
                    raise outcome
                then(outcome[0])
            except StorageError as error:
                ticket.settle(self._said(ticket.request, error))
            except Exception as error:
                # A border: what fails for one client must not end the thread that hears for all.
                log.exception("an answer of the controller could not be followed")
                ticket.settle(StorageError(f"{type(error).__name__}: {error}"))

    def _said(self, request: wire.Request, error: StorageError) -> StorageError:
        """Return what to say of an error: a lease of a table that is not there is lost."""
        if isinstance(request, Stage) and request.lease is not None and request.table not in self._shelves:
            return LeaseLost(f"lease {request.lease}: table {request.table!r} was dropped")
        return error

    def _admit(self, ticket: Ticket, table: str, intake: Intake, traits: "list[Trait] | None" = None) -> None:
        shared = intake.shared
        groups = wire.pack(shared["group_id"].array) if "group_id" in shared else None
        size = shared.nbytes + (8 * len(shared) if groups is None else 0) + intake.own.nbytes
        columns = dict.fromkeys([*shared.names, *intake.own.names, "group_id"])
        known = self._shelf(table).traits
        known.update(traits or ())
        measured = tuple(_measured(trait, intake) for trait in known if trait[1] in columns)
        request = Admit(table, intake.id, len(shared), size, list(columns), groups, intake.repeat, measured)
        self._ask(ticket, request, partial(self._admitted, ticket, table, intake))

    def _admitted(self, ticket: Ticket, table: str, intake: Intake, reply: wire.Reply) -> None:
        match reply:
            case Lacking():
                self._admit(ticket, table, intake, reply.traits)
            case Admitted():
                answer = wire.Rows(reply.rows, reply.unit)
                if reply.known:
                    # After the copies of the rows, which may be under way.
                    self._copier.submit(ticket.settle, (answer, None))
                    return
                rows = wire.unpack(reply.rows)
                copies = [(reply.mirror, rows, *part) for part in self._keep(table, intake, rows, reply.groups)]
                self._copied(table, copies, lambda: ticket.settle((answer, None)))

    def _keep(self, table: str, intake: Intake, rows: Int64s, groups: bytes) -> list[tuple[Batch, Int64s]]:
        unit = self._shelf(table).unit
        unit.reach(int(rows.max(initial=-1)) + 1)
        if "group_id" not in intake.shared:
            intake = replace(intake, shared=intake.shared.with_columns({"group_id": wire.unpack(groups)}))
        for batch, places in intake.parts:
            unit.put(rows, batch, places)
        return list(intake.parts)

    def _write(
        self, ticket: Ticket, request: Stage, rows: Int64s, batch: Batch, traits: "list[Trait] | None" = None
    ) -> None:
        shelf = self._shelf(request.table)
        fresh = shelf.fresh(rows, batch)
        bits = np.zeros(len(rows), np.uint64)
        for name, places in zip(batch.names, fresh, strict=True):
            bits[places] |= shelf.schema.mask([name])
        new = parts(rows, batch, fresh)
        shelf.traits.update(traits or ())
        asked = [trait for trait in shelf.traits if trait[1] in batch]
        measured = tuple(Measured(trait, _packed(measure(trait, batch[trait[1]]))) for trait in asked)
        size = sum(part.nbytes for _, part in new)
        fresh_bits = wire.pack(bits.view(np.int64))
        about = request.table, request.rows, list(batch.names), fresh_bits
        written = Written(*about, request.write_id, request.parts, size, request.lease, measured)
        self._ask(ticket, written, partial(self._written, ticket, request, rows, batch, new))

    def _written(
        self,
        ticket: Ticket,
        request: Stage,
        rows: Int64s,
        batch: Batch,
        new: list[tuple[Int64s, Batch]],
        reply: wire.Reply,
    ) -> None:
        match reply:
            case Lacking():
                self._write(ticket, request, rows, batch, reply.traits)
            case Stale():
                self._write(ticket, request, rows, batch)
            case _:
                for part in new:
                    self._shelf(request.table).unit.put(*part)
                copies = _copies(rows, new, reply.mirrors) if isinstance(reply, Entered) else []
                self._copied(request.table, copies, lambda: ticket.settle((wire.Ok(), None)))

    # Copies on other units

    def _copied(self, table: str, copies: "list[_Copy]", then: Callable[[], None]) -> None:
        """Go on once other units have copies; one that has died needs none, and another gets its own."""
        copies = [each for each in copies if each[0] and len(each[1])]
        if copies:
            self._copier.submit(self._send_copies, table, copies, then)
        else:
            then()

    def _send_copies(self, table: str, copies: "list[_Copy]", then: Callable[[], None]) -> None:
        for unit, rows, batch, places in copies:
            try:
                load = Load(self._shape(table), int(rows.max()) + 1, wire.pack(rows), wire.pack(places), copy=True)
                self._mirror(unit).send(load, batch).result(_PATIENCE)
                mirrored = Mirrored(table, wire.pack(rows), list(batch.names), unit)
                self._upstream.send(mirrored).result(_PATIENCE)
            except Exception as error:
                # A border: the client that waits for the copies must be answered.
                known = isinstance(error, StorageError)
                log.warning("a copy of rows of table %r was not made: %s", table, error, exc_info=not known)
                self._upstream.send(Mirrored(table, wire.pack(rows), [], unit))
        then()

    def _shape(self, table: str) -> Shape:
        with self._lock:
            shelf = self._shelf(table)
            return Shape(table, shelf.schema.columns, shelf.unit.base, list(shelf.traits))

    def _mirror(self, unit: int) -> RemoteLink:
        link = self._mirrors.get(unit)
        if link is None or link.ended is not None:
            listed = self._upstream.send(AskUnits()).result(_PATIENCE)[0]
            if not isinstance(listed, UnitList) or unit not in listed.units:
                raise QueueClosed(f"unit {unit} has gone")
            link = RemoteLink(listed.units[unit], GRACE, self._keys, self._encrypt_bulk)
            link.attend()
            self._mirrors[unit] = link
        return link

    def _copy(self, order: Copy) -> None:
        unit = self._shelf(order.table).unit
        copies = [
            (order.unit, rows, unit.gather(rows, names), np.arange(len(rows)))
            for rows, names in unit.patterns(wire.unpack(order.rows))
        ]
        self._copied(order.table, copies, lambda: None)

    def _promote(self, order: Promote) -> None:
        shelf, rows = self._shelf(order.table), wire.unpack(order.rows)
        before = shelf.nbytes
        for some, names in shelf.copies.patterns(rows):
            shelf.unit.reach(int(some.max()) + 1)
            shelf.unit.put(some, shelf.copies.gather(some, names))
        _free_known(shelf.copies, rows)
        self._upstream.send(Grown(order.table, shelf.nbytes - before))

    def _fetch(self, ticket: Ticket, hold: int) -> None:
        if hold in self._holds:
            ticket.settle((wire.Ok(), self._holds.pop(hold)))
        elif hold <= self._announced:
            raise LeaseLost(f"what lease {hold} holds was let go before it was fetched")
        else:
            self._fetches[hold] = ticket

    def _take(self, ticket: Ticket, request: Take) -> None:
        if request.cut > self._announced:
            self._takes.append((ticket, request))
            return
        if request.cut != self._cut:
            raise StorageError(f"cut {request.cut} has been let go for a later one")
        blocks = self._blocks.get(request.table, [])
        if request.number >= len(blocks):
            ticket.settle((wire.End(), None))
        else:
            block = blocks[request.number]
            ticket.settle((Taken(wire.pack(block.rows), wire.pack(block.places), block.dead), block.batch))

    # What waits for memory

    def _enter(self, parked: "_Parked") -> None:
        """Go on with what fits into memory, first come first, or let it wait."""
        self._parked = [each for each in self._parked if each.ticket.open]
        if self._spill is None or (not self._parked and self._spill.fits(parked.nbytes)):
            parked.then()
        else:
            self._parked.append(parked)

    def _relieved(self) -> None:
        """Hear that memory or disk has changed: go on with what waits, and tell the controller."""
        while self._parked and self._spill is not None and self._spill.fits(self._parked[0].nbytes):
            parked = self._parked.pop(0)
            try:
                parked.then()
            except StorageError as error:
                parked.ticket.settle(error)
        for table, shelf in self._shelves.items():
            if shelf.saved > shelf.told:
                self._upstream.send(Grown(table, shelf.told - shelf.saved))
                shelf.told = shelf.saved
        self._report()

    def _report(self) -> None:
        """Tell the controller what is on the disk."""
        if self._spill is not None:
            now = self._spill.status
            told = Spilled(now.spilled, now.limit, now.folder, now.trouble)
            if told != self._reported:
                self._reported = told
                self._upstream.send(told)

    def _forsake(self, error: StorageError, table: str | None = None) -> None:
        """End what waits for memory, or that of one table."""
        parked, self._parked = self._parked, []
        for each in parked:
            if table is None or getattr(each.ticket.request, "table", None) == table:
                each.ticket.settle(error)
            else:
                self._parked.append(each)

    def _loaded(self, ticket: Ticket, request: Load, batch: Batch) -> None:
        self._load(request, batch)
        ticket.settle((wire.Ok(), None))

    def _load(self, request: Load, batch: Batch) -> None:
        rows, places = wire.unpack(request.rows), wire.unpack(request.places)
        if len(rows) != len(places) or np.any((places < 0) | (places >= len(batch))):
            raise SchemaError(f"{len(rows)} rows at {len(places)} places of a batch of {len(batch)}")
        self._obey(request.shape)
        shelf = self._shelf(request.shape.table)
        unit, before = shelf.copies if request.copy else shelf.unit, shelf.nbytes
        # Rows that went while they were under way are forgotten here.
        rows, places = rows[rows >= unit.base], places[rows >= unit.base]
        unit.reach(request.stop)
        unit.put(rows, batch, places)
        if request.copy:
            self._upstream.send(Grown(request.shape.table, shelf.nbytes - before))

    # What the controller orders

    def _hear(self, outcome: Outcome) -> None:
        with self._lock:
            if isinstance(outcome, StorageError):
                self._fail(outcome)
            elif isinstance(outcome[0], Orders):
                for order in outcome[0].orders:
                    try:
                        self._obey(order)
                    except Exception:
                        log.exception("an order of the controller could not be followed: %s", type(order).__name__)
            self._joined.set()

    def _fail(self, error: StorageError) -> None:
        self._failure = error
        for ticket in self._fetches.values():
            ticket.settle(QueueClosed(*error.args))
        self._fetches.clear()
        self._forsake(QueueClosed(*error.args))
        self.over.set()

    def _obey(self, order: Order) -> None:
        match order:
            case Shape():
                if order.table not in self._shelves:
                    self._shelves[order.table] = Shelf(order.columns, order.base, self._spill)
                self._shelves[order.table].shape(order.columns)
                self._shelves[order.table].traits.update(order.traits)
            case Close():
                self._close_table(order.table)
            case Hold():
                self._hold(order)
            case Unhold():
                for hold in order.holds:
                    self._holds.pop(hold, None)
            case Cut():
                self._cut, self._announced = order.cut, max(self._announced, order.cut)
                kept = self._shelves if order.cut else {}
                self._blocks = {table: shelf.unit.blocks() for table, shelf in kept.items()}
                waiting, self._takes = self._takes, []
                for ticket, take in waiting:
                    self._take(ticket, take)
            case Free():
                self._free(order)
            case Adopt():
                self._adopt(order)
            case Promote():
                self._promote(order)
            case Copy():
                self._copy(order)

    def _close_table(self, table: str) -> None:
        shelf = self._shelves.pop(table, None)
        if shelf is not None:
            shelf.clear()
            self._report()
        self._forsake(QueueClosed(f"table {table!r} was dropped"), table)

    def _free(self, order: Free) -> None:
        shelf, freed = self._shelves.get(order.table), 0
        if shelf is not None:
            before, rows = shelf.nbytes, wire.unpack(order.rows)
            for unit in (shelf.unit, shelf.copies):
                _free_known(unit, rows)
                unit.forget(order.base)
            freed = before - shelf.nbytes
            self._report()
        self._upstream.send(Freed(order.table, freed))

    def _adopt(self, order: Adopt) -> None:
        rows, unit = wire.unpack(order.rows), self._shelf(order.table).unit
        unit.reach(int(rows.max(initial=-1)) + 1)
        cells = {name: wire.unpack(values) for name, values in order.identity.items()}
        unit.put(rows, Batch({"source": blank(len(rows)), **cells}))

    def _hold(self, order: Hold) -> None:
        cells = self._shelf(order.table).unit.locate(wire.unpack(order.rows), order.columns)
        self._announced = max(self._announced, order.hold)
        waiting = self._fetches.pop(order.hold, None)
        if waiting is not None and waiting.open:
            waiting.settle((wire.Ok(), cells))
        else:
            self._holds[order.hold] = cells


def _free_known(unit: Unit, rows: Int64s) -> None:
    """Free those of the rows that a unit has."""
    for some, _ in unit.patterns(rows):
        unit.free(some)


def _copies(rows: Int64s, new: list[tuple[Int64s, Batch]], mirrors: Places) -> "list[_Copy]":
    """Return the cells of a write for each of the units that are to have a copy."""
    at = np.zeros(len(rows), np.int64) + (mirrors.units[0] if mirrors.units else 0)
    if mirrors.at:
        at = np.array(mirrors.units)[np.frombuffer(mirrors.at, np.uint8)]
    found: list[_Copy] = []
    for unit in np.unique(at).tolist():
        for some, batch in new:
            mine = np.flatnonzero(np.isin(some, rows[at == unit]))
            found.append((unit, some[mine], batch.take(mine), np.arange(len(mine))))
    return found


def _given(batch: Batch | None) -> Batch:
    if batch is None:
        raise SchemaError("the request needs a batch")
    return batch


def _measured(trait: Trait, intake: Intake) -> Measured:
    """Return a trait of every row of a put that has its column."""
    batch, places = next(part for part in intake.parts if trait[1] in part[0])
    return Measured(trait, _packed(measure(trait, batch[trait[1]])[places]))


def _packed(values: "np.typing.NDArray[np.float64]") -> bytes:
    return values.astype("<f8", copy=False).tobytes()
