"""Numbers about each row that samplers choose by: tokens, version, priority.

They are taken from columns as they are written, only from those that a task names, so a table without such
tasks pays nothing. Each is a flat float64 array by row, exact for whole numbers below 2⁵³.
"""

import numpy as np

from asyncflow.errors import SchemaError
from asyncflow.storage.batch import Batch, Column
from asyncflow.storage.image import TraitImage
from asyncflow.storage.rolling import Rolling
from asyncflow.storage.schema import DType
from asyncflow.storage.spec import Choice, Trait
from asyncflow.types import Float64s, Int64s


class Traits:
    """The traits of the rows of one table."""

    def __init__(self, base: int = 0) -> None:
        self._kept: dict[Trait, Rolling[np.float64]] = {}
        self._base = self._stop = base
        self.unknown: dict[Trait, Int64s] = {}
        """Rows that had the column before the trait was watched, where cells lie elsewhere and are yet to be asked."""

    @property
    def watched(self) -> tuple[Trait, ...]:
        """What is kept."""
        return tuple(self._kept)

    def set(self, trait: Trait, rows: Int64s, values: Float64s) -> None:
        """Take what somebody else has measured; what is not kept is left."""
        if len(values) != len(rows):
            raise SchemaError(f"{len(values)} values of {trait} for {len(rows)} rows")
        if trait in self._kept:
            self._kept[trait].put(rows, values)

    def image(self) -> list[TraitImage]:
        """Return what is kept as it stands."""
        return [TraitImage(what, column, values.copy()) for (what, column), values in self._kept.items()]

    def load(self, traits: list[TraitImage], base: int, stop: int) -> None:
        """Stand as an image says, for rows from `base` to `stop`."""
        self._base, self._stop = base, stop
        self._kept.clear()
        for trait in traits:
            values = self._kept[trait.what, trait.column] = Rolling(np.float64)
            values.load(trait.values, base)

    def watch(self, trait: Trait, kind: DType) -> bool:
        """Keep a trait from now on, of columns of this dtype; return whether it was not kept before."""
        _check(trait, kind)
        if trait in self._kept:
            return False
        self._kept[trait] = Rolling(np.float64, base=self._base)
        self._kept[trait].grow(self._stop - self._base)
        return True

    def grow(self, count: int) -> None:
        """Make room for new rows."""
        self._stop += count
        for column in self._kept.values():
            column.grow(count)

    def note(self, rows: Int64s, batch: Batch, places: Int64s | None = None) -> None:
        """Take what is kept from the cells of rows, row i at place i of the batch unless told otherwise."""
        for trait, column in self._kept.items():
            if trait[1] in batch:
                values = measure(trait, batch[trait[1]])
                column.put(rows, values if places is None else values[places])

    def forget(self, row: int) -> None:
        """Let rows below this one go."""
        self._base = max(self._base, row)
        for column in self._kept.values():
            column.forget(row)

    def tokens(self, choice: Choice, rows: Int64s) -> Int64s:
        """Return the tokens of rows."""
        tokens = np.zeros(len(rows), np.int64)
        for name in choice.tokens:
            tokens += self._kept["tokens", name].at(rows).astype(np.int64)
        return tokens

    def version(self, choice: Choice, rows: Int64s) -> Float64s:
        """Return the oldest version of rows, infinity where a row has none."""
        return self._kept["version", choice.version].at(rows)

    def priority(self, choice: Choice, rows: Int64s) -> Float64s:
        """Return the priority of rows."""
        return self._kept["priority", choice.priority].at(rows)


def _check(trait: Trait, kind: DType) -> None:
    what, column = trait
    number = kind.kind in ("fixed", "list") and kind.logical != "bfloat16"
    whole, single = number and kind.item.kind in "iu", kind.kind == "fixed" and not kind.shape
    fits = {"tokens": kind.kind == "list" or (whole and single), "version": whole, "priority": number and single}
    if not fits[what]:
        raise SchemaError(f"column {column!r} is {kind.name}, which cannot tell the {what} of a row")


def measure(trait: Trait, column: Column) -> Float64s:
    """Return the trait of each cell."""
    if trait[0] == "tokens" and column.offsets is not None:
        return column.lengths.astype(np.float64)
    if trait[0] == "version":
        return _oldest(column)
    return column.array.astype(np.float64)


def _oldest(column: Column) -> Float64s:
    """Return the smallest value of each cell, infinity for empty ones."""
    lengths = column.lengths
    least = np.full(len(column), np.inf)
    filled = np.flatnonzero(lengths)
    if len(filled):
        starts = np.cumsum(lengths)[filled] - lengths[filled]
        least[filled] = np.minimum.reduceat(column.values.reshape(-1), starts)
    return least
