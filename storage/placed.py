"""A table whose cells are held by storage units: which unit has which row, and what the units are told.

The ledger is here and the cells are there. A row lives whole on one unit. Orders to a unit go the way of the
answers to it, in order, so a unit has stored what it is told to hold, and frees nothing before it holds it.
"""

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from asyncflow.errors import ColumnMissing, SchemaError, StorageError, UnitLost
from asyncflow.storage import wire
from asyncflow.storage.intake import check_groups
from asyncflow.storage.ledger import listed
from asyncflow.storage.orders import (
    Admit,
    Admitted,
    Adopt,
    Copy,
    Entered,
    Free,
    Hold,
    Lacking,
    Measured,
    Mirrored,
    Placed,
    Places,
    Promote,
    Shape,
    Stale,
    Unhold,
    Written,
)
from asyncflow.storage.placement import Placement, places_of
from asyncflow.storage.schema import IDENTITY, Schema
from asyncflow.storage.spec import Choice, TaskSpec, Trait
from asyncflow.storage.store import Limits, Store, TableCut
from asyncflow.storage.units import Units
from asyncflow.types import Int64s

_TOLD = ("prompt_id", "rollout_id", "segment")

LOST = "unit_lost"
"""Why rows are dropped whose unit has died."""

# Readings that nobody has fetched are let go after so many later ones of the same table.
_READINGS = 4096


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
        self._before = units.marks
        """How often each unit had been told to free rows: of tables that had this name before."""
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
            return Admitted(wire.pack(self._admitted(arrival)), b"", True, self._units.best())
        lacking = self._unknown(request.columns, request.traits)
        if lacking:
            return Lacking(lacking)
        groups = arrival.groups
        if groups is None:
            groups = np.arange(self.ledger.groups.unused, self.ledger.groups.unused + request.rows)
        rows = np.arange(self.ledger.stop, self.ledger.stop + arrival.rows)
        mirror = self._other(arrival.unit)
        self.placement.admit(rows, arrival.unit, mirror)
        self.placement.grew(arrival.unit, arrival.nbytes)
        self.ledger.traits.grow(len(rows))
        self._note(rows, request.traits)
        self.ledger.admit(len(rows), np.repeat(groups, request.repeat), self.schema.mask(request.columns))
        self._remember(arrival.id, rows)
        return Admitted(wire.pack(rows), wire.pack(groups), False, self._units.best(), mirror)

    def _admitted(self, arrival: Arriving) -> Int64s:
        """Return the rows of a put that comes again.

        Where each row is on two units, its copy may be under way still, and die with the unit that sends it: then the
        rows go, and the put is to bring them anew. So it must be asked again, but by a unit that has the rows, which
        answers after its copies.
        """
        rows = self._puts[arrival.id]
        if self.limits.replicas == 1:
            return rows
        living = rows[self.ledger.alive(rows)]
        cells = self.ledger.written(living) & self.schema.mask(arrival.request.columns)
        bare = (cells & ~self.placement.copied(living) != 0) & (self.placement.mirrors(living) != 0)
        if np.any(bare & (self.placement.at(living) != arrival.unit)):
            raise UnitLost(f"table {self.name!r}: {listed(living[bare])} of a put that comes again have no copy yet")
        return rows

    def _other(self, unit: int) -> int:
        """Return the unit that is to have a copy of rows of another one."""
        return self._units.best(but=unit) if self.limits.replicas > 1 else 0

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

    def entered(self, rows: Int64s) -> wire.Reply:
        """Return what a unit is told of a part that has become visible."""
        if self.limits.replicas == 1:
            return wire.Ok()
        return Entered(places_of(self.placement.mirrors(rows)))

    def mirrored(self, told: Mirrored) -> None:
        """Hear that there is a copy of rows, or none; of those that have gone meanwhile, it goes too."""
        rows = wire.unpack(told.rows)
        living = self.ledger.alive(rows)
        living[living] = self.placement.mirrors(rows[living]) == told.unit
        if told.columns:
            self.placement.copy(rows[living], self.schema.mask(told.columns))
            rows = rows[~living]
        else:  # not asked of the same unit again and again, but when the next one joins
            self.placement.mirror(rows[living], 0)
        if len(rows):
            self._units.free(told.unit, Free(self.name, wire.pack(rows), self.ledger.base))

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
        store = cls(cut.name, Schema(cut.columns), cut.limits, cut.ledger.base, leases, units)
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
        for unit in np.unique(at).tolist():
            self._units.tell(unit, Hold(hold, self.name, wire.pack(rows[at == unit]), columns))
        return places_of(at)

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

    def freed(self, unit: int, size: int) -> None:
        """Hear that a unit has freed memory, if it was of this table and not of one that had its name before."""
        if self._units.beyond(unit, self._before):
            self.placement.grew(unit, -size)

    def sweep(self) -> None:
        """Have the cells of rows freed that have gone since the last call."""
        rows = self.ledger.freed()
        if len(rows):
            self.placement.free(rows, self.ledger.base)

    def lose(self, unit: int) -> None:
        """Go on with the copies of what a unit held that has died; what has none is made anew, or dropped."""
        self.placement.sizes.pop(unit, None)
        self._before.pop(unit, None)
        copies = self.placement.mirrored_on(unit)
        self.placement.mirror(copies, 0)
        rows = self.placement.on(unit)
        rows = rows[self.ledger.alive(rows)]
        kept, identity = self.placement.copied(rows), self.schema.mask(list(IDENTITY))
        kept[kept & identity != identity] = 0  # half of a copy, of a put that nobody was told of
        saved, heirs = kept != 0, self.placement.mirrors(rows)
        for heir in np.unique(heirs[saved]).tolist():
            mine = rows[saved & (heirs == heir)]
            self.placement.move(mine, heir)
            self._units.tell(heir, Promote(self.name, wire.pack(mine)))
        lost = self.ledger.written(rows) & ~kept
        for columns in np.unique(lost[lost != 0]):
            self._forsake(rows[lost == columns], kept[lost == columns], columns)
        self._homeless = np.concatenate([self._homeless, rows[~saved]])
        self.rehome()

    def _forsake(self, rows: Int64s, kept: npt.NDArray[np.uint64], columns: np.uint64) -> None:
        """Have the columns of rows made anew that are lost, or drop the rows if nobody can."""
        again = self._units.recompute(self.name, self.schema.names(columns))
        # A copy lacks only what nobody was told of: its writer sends it again, and the row goes on without.
        left = kept != 0 if not again else np.ones(len(rows), np.bool_)
        self.ledger.lose(rows[left], kept[left], list(again))
        rows = rows[~left]
        if not len(rows):
            return
        self.ledger.drop(rows, LOST)
        # Whoever still waits for the answer to their put sends it again: it is to bring them then.
        self._puts = {name: put for name, put in self._puts.items() if not np.isin(put, rows).any()}

    def rehome(self) -> None:
        """Give rows that are on no unit to one, with their identity, which is known here; have missing copies made."""
        unit = self._units.best()
        rows, self._homeless = self._homeless, np.empty(0, np.int64) if unit else self._homeless
        rows = rows[self.ledger.alive(rows)]
        if unit and len(rows):
            identity = {name: self.ledger.traits.priority(Choice(priority=name), rows) for name in _TOLD}
            cells = {name: wire.pack(values.astype(np.int64)) for name, values in identity.items()}
            cells["group_id"] = wire.pack(self.ledger.groups.ids(rows))
            self.placement.move(rows, unit)
            self.placement.grew(unit, 8 * (len(cells) + 1) * len(rows) + 8)
            self._units.tell(unit, Adopt(self.name, wire.pack(rows), cells))
            self.ledger.write(rows, self.schema.mask(list(IDENTITY)))
        if self.limits.replicas > 1:
            self._mirror_all()

    def _mirror_all(self) -> None:
        """Have a copy made of every row that has none, if there is a unit for it."""
        rows = np.setdiff1d(self.placement.mirrored_on(0), self._homeless)
        rows = rows[self.ledger.alive(rows)]
        at = self.placement.at(rows)
        for unit in np.unique(at).tolist():
            other, mine = self._other(unit), rows[at == unit]
            if other:
                self.placement.mirror(mine, other)
                self._units.tell(unit, Copy(self.name, wire.pack(mine), other))
