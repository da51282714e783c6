"""One table where it lives: its ledger, its cells and its limits.

Every method either does all of its work or raises and changes nothing. Nothing here waits: whether a put
fits now is a question (`fits`), and who waits for it is the controller's business.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np

from asyncflow.errors import CapacityExceeded, CellConflict, ColumnMissing
from asyncflow.storage import effect, wire
from asyncflow.storage.batch import Batch, Column
from asyncflow.storage.effect import Scribe
from asyncflow.storage.image import LedgerImage
from asyncflow.storage.intake import Arrival, Intake, check_write, taken
from asyncflow.storage.ledger import Ledger, listed
from asyncflow.storage.schema import Schema
from asyncflow.storage.spec import TaskSpec
from asyncflow.storage.spill import Spill
from asyncflow.storage.status import Counts, TableStatus, TaskCounts
from asyncflow.storage.unit import Block, Cells, Unit, parts
from asyncflow.types import Int64s

# A put that is sent again is recognised among this many before it.
_REMEMBERED_PUTS = 8192

A = TypeVar("A", bound=Arrival)


@dataclass(frozen=True, slots=True)
class Limits:
    """How much a table may hold; None is no limit."""

    rows: int | None = None
    bytes: int | None = None
    replicas: int = 1
    """Storage units that hold each row."""


@dataclass(frozen=True, slots=True)
class TableCut:
    """A table as it stood in one moment; nothing of it changes any more."""

    name: str
    columns: dict[str, str]
    max_rows: int | None
    max_bytes: int | None
    replicas: int
    ledger: LedgerImage
    puts: dict[bytes, Int64s]
    blocks: Iterable[Block]

    @property
    def limits(self) -> Limits:
        """How much the table may hold."""
        return Limits(self.max_rows, self.max_bytes, self.replicas)


class Store:
    """The rows of one table."""

    def __init__(
        self,
        name: str,
        schema: Schema,
        limits: Limits,
        base: int = 0,
        leases: Iterator[int] | None = None,
        spill: Spill | None = None,
    ) -> None:
        """Begin with row `base` and take lease ids from `leases`: neither may mean what it meant to another table."""
        self.name, self.schema, self.limits = name, schema, limits
        self.ledger = Ledger(base, leases)
        self._spill = spill
        self._unit = Unit(schema.columns, base, spill)
        self._puts: dict[bytes, Int64s] = {}

    @classmethod
    def of(cls, cut: TableCut, leases: Iterator[int], spill: Spill | None = None) -> "Store":
        """Return the table of a cut, with no lease: what was leased is ready again."""
        store = cls(cut.name, Schema(cut.columns), cut.limits, cut.ledger.base, leases, spill)
        store.ledger.load(cut.ledger, {task.name: store.schema.mask(task.spec.needs) for task in cut.ledger.tasks})
        store._unit.admit(store.ledger.stop - store.ledger.base)
        store._unit.load(cut.blocks, store.ledger.alive)
        store._puts = dict(cut.puts)
        return store

    def cut(self) -> TableCut:
        """Return the table as it stands: flat arrays are copied, cells are not."""
        self.sweep()
        columns, limits = dict(self.schema.columns), self.limits
        ledger, blocks = self.ledger.image(), self._unit.blocks()
        limited = limits.rows, limits.bytes, limits.replicas
        return TableCut(self.name, columns, *limited, ledger, dict(self._puts), blocks)

    @property
    def nbytes(self) -> int:
        """Bytes of all cells."""
        return self._unit.nbytes

    def record(self, scribe: Scribe) -> None:
        """Tell a scribe of everything that happens from now on."""
        self.ledger.scribe = scribe

    def intake(self, batch: Batch, repeat: int, put_id: bytes) -> Intake:
        """Check a put against schema and limits, and fill in its identity columns."""
        return self.bounded(taken(self.schema, batch, repeat, put_id))

    def bounded(self, intake: A) -> A:
        """Refuse a put that would not fit into an empty table."""
        limits = self.limits
        if _over(intake.rows, limits.rows) or (limits.bytes is not None and intake.nbytes > limits.bytes):
            raise CapacityExceeded(
                f"table {self.name!r} holds at most {self.limits.rows} rows and {self.limits.bytes} bytes; "
                f"one put has {intake.rows} rows and {intake.nbytes} bytes"
            )
        return intake

    def fits(self, intake: Arrival) -> bool:
        """Whether there is room for a put now; one that was admitted before always fits."""
        return intake.id in self._puts or (
            self._has_room(intake) and (self._spill is None or self._spill.fits(intake.nbytes))
        )

    def _has_room(self, intake: Arrival) -> bool:
        limits = self.limits
        return not (
            _over(self.ledger.live + intake.rows, limits.rows)
            or (limits.bytes is not None and self.nbytes + intake.nbytes > limits.bytes)
        )

    def pressed(self, intake: Arrival) -> str:
        """Say what holds a put back if it is memory alone, and nothing if it is not."""
        held = self._spill is not None and self._has_room(intake) and not self._spill.fits(intake.nbytes)
        return str(self._spill) if held else ""

    def clear(self) -> None:
        """Let all cells go, for good."""
        self._unit.clear()

    def admit(self, intake: Intake) -> Int64s:
        """Admit the rows of a put and return their ids; the same put again only returns them."""
        if intake.id in self._puts:
            return self._puts[intake.id]
        shared = intake.shared
        if "group_id" not in shared:
            fresh = self.ledger.groups.unused
            intake = replace(intake, shared=shared.with_columns({"group_id": np.arange(fresh, fresh + len(shared))}))
        rows = np.arange(self.ledger.stop, self.ledger.stop + intake.rows)
        self.ledger.scribe.before(effect.Admitted(intake.id, intake.repeat, self.ledger.stop), intake.shared)
        self._unit.admit(len(rows))
        self.ledger.traits.grow(len(rows))
        for batch, places in intake.parts:
            self._unit.put(rows, batch, places)
            self.ledger.traits.note(rows, batch, places)
        # The last thing: what is ready may be chosen at once, by its traits.
        groups: Int64s = np.repeat(intake.shared["group_id"].array, intake.repeat)
        self.ledger.admit(len(rows), groups, self.schema.mask([*intake.shared.names, *intake.own.names]))
        self._remember(intake.id, rows)
        return rows

    def _remember(self, put_id: bytes, rows: Int64s) -> None:
        self._puts[put_id] = rows
        if len(self._puts) > _REMEMBERED_PUTS:
            del self._puts[next(iter(self._puts))]

    def write(self, rows: Int64s, batch: Batch) -> None:
        """Add cells to living rows; a cell that is written already must be given the same value."""
        check_write(self.schema, rows, batch)
        self.ledger.require(rows)
        try:
            fresh = self._unit.fresh(rows, batch)
        except CellConflict as conflict:
            raise CellConflict(f"table {self.name!r}: {conflict}") from None
        if any(len(places) for places in fresh):
            self.ledger.scribe.before(effect.Written(wire.pack(rows)), batch)
        for part in parts(rows, batch, fresh):
            self._unit.put(*part)
        self.ledger.traits.note(rows, batch)
        self.ledger.write(rows, self.schema.mask(batch.names))

    def widen(self, columns: Mapping[str, str]) -> None:
        """Add columns, written for no row; one that exists must be of the same dtype."""
        known, wider = self.schema, self.schema.with_columns(columns)
        if wider.columns.keys() != known.columns.keys():
            self.ledger.scribe.before(effect.Widened(dict(columns)))
        self.schema = wider
        self._unit.widen([name for name in self.schema.columns if name not in known.columns])

    def declare(self, name: str, spec: TaskSpec) -> None:
        """Add a task, which sees the living rows there are."""
        need = self.schema.mask(spec.needs)
        if name not in self.ledger.tasks:
            spec.check(name)
            for trait in spec.choice.traits:
                if self.ledger.traits.watch(trait, self.schema.dtype(trait[1])):
                    rows = self._having(trait[1])
                    if len(rows):
                        self.ledger.traits.note(rows, self._unit.gather(rows, [trait[1]]))
        self.ledger.declare(name, spec, need)

    def _having(self, column: str) -> Int64s:
        """Return the living rows that have a column."""
        every = np.arange(self.ledger.base, self.ledger.stop)
        rows = every[self.ledger.alive(every)]
        found: Int64s = rows[self.ledger.written(rows) & self.schema.mask([column]) != 0]
        return found

    def find(self, rows: Int64s, columns: "tuple[str, ...] | list[str]") -> Cells | Batch:
        """Find cells of living rows in the order of the request; nothing is consumed, nor copied yet."""
        need = self.schema.mask(columns)
        self.ledger.require(rows)
        lacking = self.ledger.written(rows) & need != need
        if lacking.any():
            missing = self.missing(rows[lacking], need)
            raise ColumnMissing(f"table {self.name!r}: {', '.join(missing)} not written for {listed(rows[lacking])}")
        if len(rows) == 0:
            return Batch({name: Column.of(self.schema.dtype(name).name, []) for name in columns}, 0)
        return self._unit.locate(rows, columns)

    def read(self, rows: Int64s, columns: "tuple[str, ...] | list[str]") -> Batch:
        """Return cells of living rows in the order of the request; nothing is consumed."""
        found = self.find(rows, columns)
        return found.gather() if isinstance(found, Cells) else found

    def missing(self, rows: Int64s, need: np.uint64) -> list[str]:
        """Return the needed columns that at least one of the living rows does not have."""
        if len(rows) == 0:
            return []
        return self.schema.names(need & ~np.bitwise_and.reduce(self.ledger.written(rows)))

    def sweep(self) -> None:
        """Free the cells of rows that have gone since the last call."""
        rows = self.ledger.freed()
        if len(rows):
            self._unit.free(rows)
            self._unit.forget(self.ledger.base)

    def counts(self) -> Counts:
        """Return what became of the rows."""
        ledger = self.ledger
        return Counts(ledger.admitted, ledger.done, dict(ledger.dropped), ledger.live)

    def status(self, waiting: int = 0) -> TableStatus:
        """Return what the table holds and how its tasks stand, while so many puts wait for room."""
        ledger, tasks = self.ledger, {}
        for name, task in ledger.tasks.items():
            blocked, ready, leased = task.counts[:3].tolist()
            tasks[name] = TaskCounts(ready, leased, task.done, blocked)
        return TableStatus(
            ledger.live,
            self.nbytes,
            self.schema.columns,
            tasks,
            ledger.sealed,
            "open" if not ledger.sealed else "draining" if ledger.live else "drained",
            self.limits.rows,
            self.limits.bytes,
            waiting,
            spilled=self._unit.spilled,
        )


def _over(amount: int, limit: int | None) -> bool:
    return limit is not None and amount > limit
