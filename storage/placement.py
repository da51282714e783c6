"""Which unit has which row of a table, and which has a copy of it."""

import numpy as np
import numpy.typing as npt

from asyncflow.storage import wire
from asyncflow.storage.orders import (
    Free,
    Places,
)
from asyncflow.storage.rolling import Rolling
from asyncflow.storage.units import Units
from asyncflow.types import Int64s


class Placement:
    """Which unit has which row, and which has a copy of it; stands where a store has its own unit."""

    def __init__(self, table: str, units: Units, base: int) -> None:
        self._table, self._units = table, units
        self._unit = Rolling(np.uint8, base=base)
        self._mirror = Rolling(np.uint8, base=base)
        self._copied = Rolling(np.uint64, base=base)
        self.sizes: dict[int, int] = {}

    @property
    def nbytes(self) -> int:
        """Bytes that the units hold of this table."""
        return sum(self.sizes.values())

    def admit(self, rows: Int64s, unit: int, mirror: int) -> None:
        """Note where new rows are, and where a copy of them is to be."""
        for column in (self._unit, self._mirror, self._copied):
            column.grow(len(rows))
        self._unit.put(rows, unit)
        self._mirror.put(rows, mirror)

    def settle(self, units: Int64s) -> None:
        """Note where the first rows are."""
        self._unit.load(units.astype(np.uint8), self._unit.base)
        for column in (self._mirror, self._copied):
            column.grow(len(units))

    def move(self, rows: Int64s, unit: int) -> None:
        """Note that rows are on another unit, and have no copy."""
        self._unit.put(rows, unit)
        self.mirror(rows, 0)

    def mirror(self, rows: Int64s, unit: int) -> None:
        """Note which unit is to have a copy of rows; it has nothing yet."""
        self._mirror.put(rows, unit)
        self._copied.put(rows, 0)

    def copy(self, rows: Int64s, columns: np.uint64) -> None:
        """Note that there is a copy of these columns."""
        self._copied.put(rows, self._copied.at(rows) | columns)

    def grew(self, unit: int, size: int) -> None:
        """Hear that a unit holds more of this table, or less."""
        self.sizes[unit] = self.sizes.get(unit, 0) + size
        self._units.grew(unit, size)

    def at(self, rows: Int64s) -> Int64s:
        """Return the unit of each row."""
        return self._unit.at(rows).astype(np.int64)

    def mirrors(self, rows: Int64s) -> Int64s:
        """Return the unit that is to have a copy of each row, 0 for none."""
        return self._mirror.at(rows).astype(np.int64)

    def copied(self, rows: Int64s) -> npt.NDArray[np.uint64]:
        """Return the columns of which there is a copy."""
        return self._copied.at(rows)

    def free(self, rows: Int64s, base: int) -> None:
        """Tell the units that rows have gone."""
        at, mirrors = self.at(rows), self.mirrors(rows)
        # One order to each unit: with the first, a unit forgets all rows below the base.
        for unit in np.unique([at, mirrors]).tolist():
            self._units.free(unit, Free(self._table, wire.pack(rows[(at == unit) | (mirrors == unit)]), base))
        for column in (self._unit, self._mirror, self._copied):
            column.forget(base)

    def on(self, unit: int) -> Int64s:
        """Return the rows that a unit has or had."""
        return self._unit.base + np.flatnonzero(self._unit.span(self._unit.base, self._unit.stop) == unit)

    def mirrored_on(self, unit: int) -> Int64s:
        """Return the rows of which a unit has a copy, or is to have one."""
        return self._unit.base + np.flatnonzero(self._mirror.span(self._unit.base, self._unit.stop) == unit)


def places_of(at: Int64s) -> Places:
    """Return the unit of each row as a message."""
    units, index = np.unique(at, return_inverse=True)
    return Places(units.tolist(), index.astype(np.uint8).tobytes() if len(units) > 1 else b"")
