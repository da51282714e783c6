"""Answers the requests about a table whose cells are on storage units, of clients and of units."""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from asyncflow.errors import StorageError
from asyncflow.storage import wire
from asyncflow.storage.batch import Batch
from asyncflow.storage.desk import OK, Desk
from asyncflow.storage.ledger import Grant
from asyncflow.storage.orders import (
    Admit,
    Close,
    Freed,
    Grown,
    Locate,
    Mirrored,
    Note,
    Placed,
    Stale,
    Unhold,
    Watch,
    Written,
)
from asyncflow.storage.placed import Arriving, PlacedStore
from asyncflow.storage.placement import places_of
from asyncflow.storage.ticket import Outcome, Ticket
from asyncflow.storage.units import Units
from asyncflow.types import Int64s


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
                return Placed(0, places_of(self.store.placement.at(rows))), None
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
        self.store.freed(self._units.number(session), request.size)
        self.advance()
        return OK

    def told(self, request: Grown | Mirrored, session: int) -> Outcome:
        """Hear what a unit has done."""
        if isinstance(request, Grown):
            self.store.placement.grew(self._units.number(session), request.size)
            if request.size < 0:
                self.relieved()
        else:
            self.store.mirrored(request)
        return OK

    def written(self, ticket: Ticket, part: Written) -> Outcome | None:
        """Take one part of a write; the last one makes all of them visible."""
        unit, rows = self._units.number(ticket.session), wire.unpack(part.rows)
        self._forget()
        parts = self._writes.setdefault(part.write_id, _Parts())
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

    def _forget(self) -> None:
        """Forget parts, and writes, that nobody waits for any more."""
        for parts in self._writes.values():
            parts.tickets = [each for each in parts.tickets if each[0].open]
        self._writes = {name: parts for name, parts in self._writes.items() if parts.tickets}

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
            ticket.settle((self.store.entered(rows), None))
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
        self._forget()
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
        name, sizes = self.store.name, self.store.placement.sizes
        super().close(error)
        for unit, size in sizes.items():
            self._units.grew(unit, -size)
        self._units.broadcast(Close(name))
