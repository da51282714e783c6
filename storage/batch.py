"""Batches: named columns of one length, in Arrow's layout, ragged sequences unpadded.

A batch is a value: nothing changes it, methods return new ones, and memory is shared wherever it can be.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, cast

import numpy as np

from asyncflow.errors import ColumnMissing, SchemaError
from asyncflow.storage.column import Column, ColumnData, Pick
from asyncflow.storage.schema import Schema
from asyncflow.types import Int64s

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["Batch", "Column", "ColumnData"]


class Batch:
    """Ordered columns of one length; plain arrays and lists become columns of the dtype they show."""

    __slots__ = ("_columns", "_nbytes", "_rows")

    def __init__(self, columns: "Mapping[str, ColumnData] | None" = None, rows: int | None = None) -> None:
        """Take columns by name; `rows` is needed only where there is no column to tell it."""
        self._nbytes = -1
        # Batches are mostly made of columns that there are: a call for each would cost more than all else here.
        self._columns = {
            name: data if isinstance(data, Column) else _column(name, data) for name, data in (columns or {}).items()
        }
        lengths = {name: len(column) for name, column in self._columns.items()}
        self._rows = next(iter(lengths.values()), 0) if rows is None else rows
        if any(length != self._rows for length in lengths.values()):
            raise SchemaError(f"columns of different lengths: {lengths}" + ("" if rows is None else f", {rows} rows"))

    @classmethod
    def alike(cls, columns: dict[str, Column], rows: int) -> "Batch":
        """Make a batch of columns that are known to have so many cells each."""
        batch = cls.__new__(cls)
        batch._columns, batch._rows, batch._nbytes = columns, rows, -1
        return batch

    @classmethod
    def of(cls, schema: Schema, columns: "Mapping[str, ColumnData] | Batch") -> "Batch":
        """Make a batch whose columns have the dtypes of a schema; anything else is a SchemaError."""
        if isinstance(columns, Batch):
            schema.check(columns.dtypes)
            return columns
        return cls({name: _column(name, data, schema.dtype(name).name) for name, data in columns.items()})

    def __len__(self) -> int:
        return self._rows

    def __getitem__(self, name: str) -> Column:
        if name not in self._columns:
            raise ColumnMissing(f"no column {name!r} in this batch; it has {', '.join(self._columns)}")
        return self._columns[name]

    def __contains__(self, name: object) -> bool:
        return name in self._columns

    def __repr__(self) -> str:
        return f"Batch({self._rows} rows, {self.dtypes})"

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the columns, in order."""
        return tuple(self._columns)

    @property
    def dtypes(self) -> dict[str, str]:
        """Dtype of each column."""
        return {name: column.dtype for name, column in self._columns.items()}

    @property
    def schema(self) -> Schema:
        """The schema of a table that could hold this batch."""
        return Schema(self.dtypes)

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        if self._nbytes < 0:
            self._nbytes = sum(column.nbytes for column in self._columns.values())
        return self._nbytes

    def select(self, names: Iterable[str]) -> "Batch":
        """Return some of the columns, in this order."""
        return Batch.alike({name: self[name] for name in names}, self._rows)

    def with_columns(self, columns: "Mapping[str, ColumnData]") -> "Batch":
        """Return the batch with more columns, or with others in the place of those of the same name."""
        return Batch({**self._columns, **columns}, self._rows if self._columns else None)

    def slice(self, start: int, stop: int) -> "Batch":
        """Return rows start to stop without a copy of the values."""
        start, stop, _ = slice(start, stop).indices(self._rows)
        stop = max(start, stop)
        return Batch.alike({name: column.slice(start, stop) for name, column in self._columns.items()}, stop - start)

    def take(self, indices: "Int64s | Sequence[int]") -> "Batch":
        """Return rows in the order of `indices`, each as often as it is named; negative ones are refused."""
        picked = np.asarray(indices, dtype=np.int64)
        if len(picked) and not (picked.min() >= 0 and picked.max() < self._rows):
            raise IndexError(f"rows {picked.min()} to {picked.max()} of a batch of {self._rows}")
        return self.pick(Pick(picked))

    def pick(self, pick: Pick) -> "Batch":
        """Return the rows of a pick, which is not checked."""
        return Batch.alike({name: column.take(pick) for name, column in self._columns.items()}, len(pick.indices))

    def copy(self) -> "Batch":
        """Return the batch with memory of its own."""
        return Batch.alike({name: column.copy() for name, column in self._columns.items()}, self._rows)

    def equals(self, other: "Batch") -> bool:
        """Whether columns, order, dtypes and every bit are the same."""
        return (
            self.names == other.names
            and len(self) == len(other)
            and all(column.equals(other[name]) for name, column in self._columns.items())
        )

    @staticmethod
    def concat(batches: "Sequence[Batch]") -> "Batch":
        """Join batches of the same columns, one after another."""
        if not batches:
            raise SchemaError("nothing to join")
        first = batches[0]
        for batch in batches:
            if batch.dtypes != first.dtypes:
                raise SchemaError(f"only batches of the same columns can be joined: {first.dtypes}, {batch.dtypes}")
        columns = {name: Column.concat([batch[name] for batch in batches]) for name in first.names}
        return Batch.alike(columns, sum(map(len, batches)))

    def to_arrow(self) -> "pa.RecordBatch":
        """Return a pyarrow RecordBatch on the same buffers (see `asyncflow.storage.arrow`)."""
        from asyncflow.storage.arrow import record_batch

        return record_batch(self._columns, self._rows)

    @classmethod
    def from_arrow(cls, records: "pa.RecordBatch") -> "Batch":
        """Take a pyarrow RecordBatch without nulls; buffers are shared where the layouts agree."""
        from asyncflow.storage.arrow import columns

        return cls(cast("Mapping[str, ColumnData]", columns(records)), records.num_rows)


def _column(name: str, data: ColumnData, dtype: str | None = None) -> Column:
    try:
        return Column.infer(data) if dtype is None else Column.of(dtype, data)
    except SchemaError as error:
        raise SchemaError(f"column {name!r}: {error}") from error
