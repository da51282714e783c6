"""A table whose cells are held by storage units: which unit has which row, and what the units are told.

The ledger is here and the cells are there. A row lives whole on one unit. Orders to a unit go the way of the
answers to it, in order, so a unit has stored what it is told to hold, and frees nothing before it holds it.
"""

import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

import numpy as np

from asyncflow.errors import ColumnMissing, SchemaError, StorageError
from asyncflow.storage import wire
from asyncflow.storage.batch import Batch
from asyncflow.storage.desk import OK, Desk
from asyncflow.storage.intake import check_groups
from asyncflow.storage.ledger import Grant, listed
from asyncflow.storage.orders import (
    Admit,
    Admitted,
    Adopt,
    Close,
    Free,
    Freed,
    Hold,
    Lacking,
    Locate,
    Measured,
    Note,
    Order,
    Orders,
    Placed,
    Places,
    Shape,
    Stale,
    Unhold,
    Watch,
    Written,
)  # fmt: skip
from asyncflow.storage.rolling import Rolling
from asyncflow.storage.schema import IDENTITY, Schema
from asyncflow.storage.spec import Choice, TaskSpec, Trait
from asyncflow.storage.store import Limits, Store, TableCut
from asyncflow.storage.ticket import Answer, Outcome, Ticket
from asyncflow.types import Int64s

_TOLD = ("prompt_id", "rollout_id", "segment")

LOST = "unit_lost"
"""Why rows are dropped whose unit has died."""

# Readings that nobody has fetched are let go after so many later ones of the same table.
_READINGS = 4096


Recompute: TypeAlias = Callable[[str, Sequence[str]], Sequence[str]]
"""Which tasks must have a row of a table again when it has lost these columns; none if nobody can make them anew."""


def _nobody(table: str, columns: Sequence[str]) -> Sequence[str]:
    return ()


@dataclass(slots=True)
class Post:
    """A unit, as the controller knows it."""

    session: int
    url: str
    tell: Callable[..., None]
    size: int = 0
    """Bytes of the cells that it holds."""
    asked: int = 0
    """How often it was told to free rows, and how often it has."""
    freed: int = 0


class Units:
    """The storage units of one controller."""

    def __init__(self, recompute: "Recompute | None" = None, keys: str | os.PathLike[str] | None = None) -> None:
        """Without a `recompute`, rows of a unit that has died are dropped; `keys` are for units on other hosts."""
        self.keys = keys
        self.recompute: Recompute = recompute or _nobody
        self._posts: dict[int, Post] = {}
        self._turn = 0
        self._joined = threading.Condition()

    def wait(self, count: int, timeout: float) -> bool:
        """Wait until so many units have joined; return whether they have."""
        with self._joined:
            return self._joined.wait_for(lambda: len(self._posts) >= count, timeout)

    @property
    def urls(self) -> dict[int, str]:
        """Where each unit serves."""
        return {number: post.url for number, post in self._posts.items()}

    @property
    def sizes(self) -> dict[str, int]:
        """Bytes of the cells that each unit holds, by its address."""
        return {post.url: post.size for post in self._posts.values()}

    def attach(self, session: int, url: str, answer: Answer) -> None:
        """Take in the unit of a session."""
        number = next((each for each in range(1, 256) if each not in self._posts), None)
        if number is None or any(post.session == session for post in self._posts.values()):
            raise StorageError(f"unit {url} cannot join: a queue has at most 255 units, and a unit joins once")
        post = self._posts[number] = Post(session, url, lambda *orders: answer((Orders(list(orders)), None)))
        post.tell()
        with self._joined:
            self._joined.notify_all()

    def leave(self, session: int) -> int | None:
        """Hear that a session has ended; return the number of the unit that it was, if it was one."""
        for number, post in self._posts.items():
            if post.session == session:
                del self._posts[number]
                return number
        return None

    def number(self, session: int) -> int:
        """Return the number of the unit that a session is."""
        for number, post in self._posts.items():
            if post.session == session:
                return number
        raise StorageError("only a storage unit may say this")

    def tell(self, number: int, order: Order) -> None:
        """Give an order to a unit, if it lives."""
        if number in self._posts:
            self._posts[number].tell(order)

    def broadcast(self, order: Order) -> None:
        """Give an order to all units."""
        for post in self._posts.values():
            post.tell(order)

    def free(self, number: int, order: Free) -> None:
        """Have a unit free rows, if it lives."""
        if number in self._posts:
            self._posts[number].asked += 1
            self._posts[number].tell(order)

    def freed(self, number: int) -> None:
        """Hear that a unit has freed what it was told to next."""
        self._posts[number].freed += 1

    @property
    def marks(self) -> dict[int, int]:
        """How often each unit was told to free rows."""
        return {number: post.asked for number, post in self._posts.items()}

    def reached(self, marks: dict[int, int]) -> bool:
        """Whether every unit that lives has freed what it had been told to by then."""
        return all(self._posts[number].freed >= mark for number, mark in marks.items() if number in self._posts)

    def grew(self, number: int, size: int) -> None:
        """Hear that a unit holds more, or less."""
        if number in self._posts:
            self._posts[number].size += size

    def best(self) -> int:
        """Return the unit that a put best goes to: of those that hold least, each in turn."""
        if not self._posts:
            return 0
        self._turn += 1
        least = min(post.size for post in self._posts.values())
        lightest = [number for number, post in self._posts.items() if post.size == least]
        return lightest[self._turn % len(lightest)]


@dataclass(frozen=True, slots=True)
class Arriving:
    """A put whose cells a unit has."""

    request: Admit
    unit: int
    groups: Int64s | None

    @property
    def id(self) -> bytes:
        """Name of the put."""
        return self.request.put_id

    @property
    def rows(self) -> int:
        """Rows to admit."""
        return self.request.rows * self.request.repeat

    @property
    def nbytes(self) -> int:
        """Bytes that the put adds."""
        return self.request.size


class Placement:
    """Which unit has which row; stands where a store has its own unit."""

    def __init__(self, table: str, units: Units, base: int) -> None:
        self._table, self._units = table, units
        self._unit = Rolling(np.uint8, base=base)
        self.sizes: dict[int, int] = {}

    @property
    def nbytes(self) -> int:
        """Bytes that the units hold of this table."""
        return sum(self.sizes.values())

    def admit(self, rows: Int64s, unit: int, size: int) -> None:
        """Note where new rows are."""
        self._unit.grow(len(rows))
        self._unit.put(rows, unit)
        self.grew(unit, size)

    def settle(self, units: Int64s) -> None:
        """Note where the first rows are."""
        self._unit.load(units.astype(np.uint8), self._unit.base)

    def move(self, rows: Int64s, unit: int, size: int) -> None:
        """Note that rows are on another unit."""
        self._unit.put(rows, unit)
        self.grew(unit, size)

    def grew(self, unit: int, size: int) -> None:
        """Hear that a unit holds more of this table, or less."""
        self.sizes[unit] = self.sizes.get(unit, 0) + size
        self._units.grew(unit, size)

    def at(self, rows: Int64s) -> Int64s:
        """Return the unit of each row."""
        return self._unit.at(rows).astype(np.int64)

    def free(self, rows: Int64s, base: int) -> None:
        """Tell the units that rows have gone."""
        at = self.at(rows)
        for unit in np.unique(at).tolist():
            self._units.free(unit, Free(self._table, wire.pack(rows[at == unit]), base))
        self._unit.forget(base)

    def on(self, unit: int) -> Int64s:
        """Return the rows that a unit has or had."""
        return self._unit.base + np.flatnonzero(self._unit.span(self._unit.base, self._unit.stop) == unit)


class PlacedStore(Store):
    """The ledger of one table whose cells lie elsewhere."""

    def __init__(
        self,
        name: str,
        schema: Schema,
        limits: Limits,
        base: int,
        leases: Iterator[int],
        units: Units,
    ) -> None:
        super().__init__(name, schema, limits, base, leases)
        self.placement = Placement(name, units, base)
        self._units, self._leases = units, leases
        self._readings: deque[int] = deque()
        self._homeless = np.empty(0, np.int64)
        self._watch_identity()
        units.broadcast(self.shape)

    def _watch_identity(self) -> None:
        """Keep what is needed to name a row whose cells are lost."""
        for column in _TOLD:
            self.ledger.traits.watch(("priority", column), self.schema.dtype(column))

    @property
    def shape(self) -> Shape:
        """What a unit must know of the table."""
        return Shape(self.name, self.schema.columns, self.ledger.base, list(self.ledger.traits.watched))

    @property
    def nbytes(self) -> int:
        """Bytes that the units hold."""
        return self.placement.nbytes

    def arrival(self, request: Admit, unit: int) -> Arriving:
        """Check what a unit says of a put."""
        self.schema.mask(request.columns)
        groups = None if request.groups is None else wire.unpack(request.groups)
        count = request.rows if groups is None else len(groups)
        if request.rows < 0 or request.repeat < 1 or request.size < 0 or count != request.rows:
            raise SchemaError(f"a put of {request.rows} rows, {request.repeat} times, {request.size} bytes")
        if groups is not None:
            check_groups(groups, request.repeat)
        return self.bounded(Arriving(request, unit, groups))

    def take_in(self, arrival: Arriving) -> Admitted | Lacking:
        """Admit the rows of a put; the same put again only returns them."""
        request = arrival.request
        if arrival.id in self._puts:
            return Admitted(wire.pack(self._puts[arrival.id]), b"", True, self._units.best())
        lacking = self._unknown(request.columns, request.traits)
        if lacking:
            return Lacking(lacking)
        groups = arrival.groups
        if groups is None:
            groups = np.arange(self.ledger.groups.unused, self.ledger.groups.unused + request.rows)
        rows = np.arange(self.ledger.stop, self.ledger.stop + arrival.rows)
        self.placement.admit(rows, arrival.unit, arrival.nbytes)
        self.ledger.traits.grow(len(rows))
        self._note(rows, request.traits)
        self.ledger.admit(len(rows), np.repeat(groups, request.repeat), self.schema.mask(request.columns))
        self._remember(arrival.id, rows)
        return Admitted(wire.pack(rows), wire.pack(groups), False, self._units.best())

    def _unknown(self, columns: list[str], told: tuple[Measured, ...]) -> list[Trait]:
        known = {each.trait for each in told}
        return [trait for trait in self.ledger.traits.watched if trait[1] in columns and trait not in known]

    def _note(self, rows: Int64s, traits: tuple[Measured, ...]) -> None:
        for each in traits:
            self.ledger.traits.set(each.trait, rows, np.frombuffer(each.values, "<f8"))

    def stale(self, part: Written, rows: Int64s, unit: int) -> Stale | Lacking | None:
        """Check a part of a write; return why it must be asked again."""
        self.ledger.require(rows)
        fresh = wire.unpack(part.fresh).view(np.uint64)
        if len(fresh) != len(rows) or part.size < 0 or np.any(self.placement.at(rows) != unit):
            raise StorageError(f"table {self.name!r}: rows of a write are not on the unit that they were sent to")
        lacking = self._unknown(part.columns, part.traits)
        if lacking:
            return Lacking(lacking)
        return Stale() if np.any(self.ledger.written(rows) & fresh) else None

    def enter(self, part: Written, rows: Int64s, unit: int) -> None:
        """Make a part of a write visible."""
        self.placement.grew(unit, part.size)
        self._note(rows, part.traits)
        self.ledger.write(rows, self.schema.mask(part.columns))

    def watch(self, trait: Trait) -> Int64s:
        """Keep a trait from now on, and return the rows of which it is not known."""
        traits = self.ledger.traits
        if traits.watch(trait, self.schema.dtype(trait[1])):
            traits.unknown[trait] = self._having(trait[1])
            self._units.broadcast(self.shape)
        unknown = traits.unknown.get(trait, np.empty(0, np.int64))
        return unknown[self.ledger.alive(unknown)]

    def note(self, rows: Int64s, told: Measured) -> None:
        """Hear a trait of rows that were written before it was watched."""
        values, living = np.frombuffer(told.values, "<f8"), self.ledger.alive(rows)
        traits = self.ledger.traits
        traits.set(told.trait, rows[living], values[living])
        if told.trait in traits.unknown:
            traits.unknown[told.trait] = np.setdiff1d(traits.unknown[told.trait], rows)

    def declare(self, name: str, spec: TaskSpec) -> None:
        """Add a task; what it chooses by must be known of all rows."""
        if name not in self.ledger.tasks and any(len(self.watch(trait)) for trait in spec.choice.traits):
            raise SchemaError(f"task {name!r}: what it chooses by is not known of all rows: watch it first")
        super().declare(name, spec)

    def widen(self, columns: Mapping[str, str]) -> None:
        """Add columns."""
        super().widen(columns)
        self._units.broadcast(self.shape)

    def cut(self) -> TableCut:
        """Return the ledger as it stands; its blocks are with the units."""
        return replace(super().cut(), blocks=())

    @classmethod
    def spread(cls, cut: TableCut, leases: Iterator[int], units: Units) -> "PlacedStore":
        """Return the table of a cut, its rows spread over the units by bytes; their cells are not there yet."""
        store = cls(cut.name, Schema(cut.columns), Limits(cut.max_rows, cut.max_bytes), cut.ledger.base, leases, units)
        store.ledger.load(cut.ledger, {task.name: store.schema.mask(task.spec.needs) for task in cut.ledger.tasks})
        store._puts = dict(cut.puts)
        store._watch_identity()
        rows = np.arange(store.ledger.base, store.ledger.stop)
        weights = np.ones(len(rows))
        for block in cut.blocks:
            known = block.rows >= store.ledger.base
            weights[block.rows[known] - store.ledger.base] += block.batch.nbytes / len(block.rows)
            living = store.ledger.alive(block.rows)
            store.ledger.traits.note(block.rows[living], block.batch, block.places[living])
        numbers = np.array(sorted(units.urls), np.int64)
        share = np.cumsum(weights) / max(weights.sum(), 1)
        store.placement.settle(numbers[np.minimum((share * len(numbers)).astype(np.int64), len(numbers) - 1)])
        return store

    def hold(self, hold: int, rows: Int64s, columns: list[str]) -> Places:
        """Have the units keep cells of living rows until they are fetched."""
        at = self.placement.at(rows)
        units, index = np.unique(at, return_inverse=True)
        for unit in units.tolist():
            self._units.tell(unit, Hold(hold, self.name, wire.pack(rows[at == unit]), columns))
        return Places(units.tolist(), index.astype(np.uint8).tobytes() if len(units) > 1 else b"")

    def reading(self, rows: Int64s, columns: list[str]) -> Placed:
        """Have cells held that are read without a lease."""
        need = self.schema.mask(columns)
        self.ledger.require(rows)
        lacking = self.ledger.written(rows) & need != need
        if lacking.any():
            missing = self.missing(rows[lacking], need)
            raise ColumnMissing(f"table {self.name!r}: {', '.join(missing)} not written for {listed(rows[lacking])}")
        number = next(self._leases)
        self._readings.append(number)
        if len(self._readings) > _READINGS:
            self._units.broadcast(Unhold([self._readings.popleft()]))
        return Placed(number, self.hold(number, rows, columns))

    def sweep(self) -> None:
        """Have the cells of rows freed that have gone since the last call."""
        rows = self.ledger.freed()
        if len(rows):
            self.placement.free(rows, self.ledger.base)

    def lose(self, unit: int) -> None:
        """Have the rows of a unit that has died made anew, or drop them if nobody can."""
        rows = self.placement.on(unit)
        rows = rows[self.ledger.alive(rows)]
        self.placement.sizes.pop(unit, None)
        again = self._units.recompute(self.name, list(self.schema.columns)) if len(rows) else ()
        if not again:
            self.ledger.drop(rows, LOST)
            return
        self.ledger.lose(rows, list(again))
        self._homeless = np.concatenate([self._homeless, rows])
        self.rehome()

    def rehome(self) -> None:
        """Give rows that are on no unit to one, with their identity, which is known here."""
        unit = self._units.best()
        rows, self._homeless = self._homeless, np.empty(0, np.int64) if unit else self._homeless
        rows = rows[self.ledger.alive(rows)]
        if unit and len(rows):
            identity = {name: self.ledger.traits.priority(Choice(priority=name), rows) for name in _TOLD}
            cells = {name: wire.pack(values.astype(np.int64)) for name, values in identity.items()}
            cells["group_id"] = wire.pack(self.ledger.groups.ids(rows))
            self.placement.move(rows, unit, 8 * (len(cells) + 1) * len(rows) + 8)
            self._units.tell(unit, Adopt(self.name, wire.pack(rows), cells))
            self.ledger.write(rows, self.schema.mask(list(IDENTITY)))


@dataclass(slots=True)
class _Parts:
    """The parts of one write that have come so far."""

    tickets: list[tuple[Ticket, Written, Int64s, int]] = field(default_factory=list)


class PlacedDesk(Desk):
    """Answers the requests about one table whose cells are on units."""

    store: PlacedStore

    def __init__(
        self, store: PlacedStore, clock: Callable[[], float], rouse: Callable[[float | None], None], units: Units
    ) -> None:
        super().__init__(store, clock, rouse)
        self._units = units
        self._writes: dict[bytes, _Parts] = {}
        self._held: set[int] = set()

    def handle(self, request: wire.Request, batch: Batch | None) -> Outcome:
        """Answer a request that never waits."""
        match request:
            case wire.Read() if request.rows:
                return self.store.reading(wire.unpack(request.rows), list(request.columns)), None
            case Locate():
                rows = wire.unpack(request.rows)
                self.store.ledger.require(rows)
                units, index = np.unique(self.store.placement.at(rows), return_inverse=True)
                at = index.astype(np.uint8).tobytes() if len(units) > 1 else b""
                return Placed(0, Places(units.tolist(), at)), None
            case Watch():
                return wire.Rows(wire.pack(self.store.watch(request.trait))), None
            case Note():
                self.store.note(wire.unpack(request.rows), request.told)
                return OK
            case wire.Write():
                raise StorageError(f"table {self.store.name!r} has storage units: cells are written there")
        return super().handle(request, batch)

    def freed(self, request: Freed, session: int) -> Outcome:
        """Hear that a unit has freed memory, for which puts may wait."""
        self.store.placement.grew(self._units.number(session), -request.size)
        self.advance()
        return OK

    def written(self, ticket: Ticket, part: Written) -> Outcome | None:
        """Take one part of a write; the last one makes all of them visible."""
        unit, rows = self._units.number(ticket.session), wire.unpack(part.rows)
        parts = self._writes.setdefault(part.write_id, _Parts())
        parts.tickets = [each for each in parts.tickets if each[0].open]
        parts.tickets.append((ticket, part, rows, unit))
        if len(parts.tickets) < part.parts:
            return None
        del self._writes[part.write_id]
        try:
            self._enter(parts, part.lease)
        except StorageError as error:
            for each, *_ in parts.tickets:
                each.settle(type(error)(*error.args))
        return None

    def _enter(self, parts: _Parts, lease: int | None) -> None:
        if lease is not None:
            self.store.ledger.covers(lease, np.concatenate([rows for _, _, rows, _ in parts.tickets]), self._clock())
        again = [self.store.stale(part, rows, unit) for _, part, rows, unit in parts.tickets]
        if any(again):
            for (ticket, *_), reply in zip(parts.tickets, again, strict=True):
                ticket.settle((reply or Stale(), None))
            return
        for ticket, part, rows, unit in parts.tickets:
            self.store.enter(part, rows, unit)
            ticket.settle(OK)
        self.advance()

    def _arrive(self, ticket: Ticket, request: wire.Put | Admit) -> Arriving:
        if isinstance(request, wire.Put):
            raise StorageError(f"table {self.store.name!r} has storage units: rows are put there")
        return self.store.arrival(request, self._units.number(ticket.session))

    def _admit(self, ticket: Ticket) -> wire.Reply:
        assert isinstance(ticket.intake, Arriving)
        return self.store.take_in(ticket.intake)

    def _leased(self, leased: wire.Leased, grant: Grant, columns: list[str]) -> Outcome:
        if len(grant.rows) == 0:
            return super()._leased(leased, grant, columns)
        leased.places = self.store.hold(grant.id, grant.rows, columns)
        self._held.add(grant.id)
        return leased, None

    def advance(self) -> None:
        """Go on as any table does, and let go what is held for leases that are over."""
        super().advance()
        over = [lease for lease in self._held if lease not in self.store.ledger.outstanding]
        if over:
            self._held.difference_update(over)
            self._units.broadcast(Unhold(over))

    def leave(self, session: int, lost: bool) -> list[int]:
        """End a session, and what a unit of it would have written."""
        for parts in self._writes.values():
            parts.tickets = [each for each in parts.tickets if each[0].session != session]
        return super().leave(session, lost)

    def lose(self, unit: int) -> None:
        """Hear that a unit has died."""
        self.store.lose(unit)
        self.advance()

    def rehome(self) -> None:
        """Hear that a unit has joined."""
        self.store.rehome()
        self.advance()

    def close(self, error: Callable[[], StorageError]) -> None:
        """End the table, on the units too."""
        name = self.store.name
        super().close(error)
        self._units.broadcast(Close(name))
