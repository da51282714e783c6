"""A put, checked against a schema and given its identity columns, before its rows are admitted."""

from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import numpy as np

from asyncflow.errors import CapacityExceeded, SchemaError
from asyncflow.storage.batch import Batch, Column
from asyncflow.storage.frames import MAX_ROWS
from asyncflow.storage.schema import Schema
from asyncflow.types import Int64s

_MAX_GROUP = 1 << 62
_FEW = 1024
_NOTHING = Batch()


class Arrival(Protocol):
    """What the admission of rows asks about them."""

    @property
    def id(self) -> bytes:
        """Name of the put: the same again is the same put."""

    @property
    def rows(self) -> int:
        """Rows to admit."""

    @property
    def nbytes(self) -> int:
        """Bytes that the put adds."""


@dataclass(frozen=True, slots=True)
class Intake:
    """A checked put: cells that all rows of a group share, and cells of the rows of a group by position."""

    id: bytes
    shared: Batch
    own: Batch
    repeat: int

    @property
    def rows(self) -> int:
        """Rows to admit."""
        return len(self.shared) * self.repeat

    @property
    def nbytes(self) -> int:
        """Bytes that the put adds."""
        return self.shared.nbytes + 8 * len(self.shared) + self.own.nbytes

    @property
    def parts(self) -> tuple[tuple[Batch, Int64s], ...]:
        """The batches that have columns, each with the place of every row in it."""
        count = len(self.shared)
        if len(self.own.names) == 0:
            return ((self.shared, np.repeat(np.arange(count), self.repeat)),)
        return (
            (self.shared, np.repeat(np.arange(count), self.repeat)),
            (self.own, np.tile(np.arange(self.repeat), count)),
        )


def taken(schema: Schema, batch: Batch, repeat: int, put_id: bytes) -> Intake:
    """Check a put and fill in its identity columns, but for the groups that are not named."""
    schema.check(batch.dtypes)
    if "group_id" in batch:  # in shared memory a client could change it after it was checked
        batch = batch.with_columns({"group_id": batch["group_id"].copy()})
    if repeat < 1:
        raise SchemaError(f"repeat is at least 1, not {repeat}")
    assigned = {"rollout_id", "segment"} & set(batch.names)
    if repeat > 1 and assigned:
        raise SchemaError(f"with repeat the queue assigns {', '.join(sorted(assigned))}")
    if "group_id" in batch:
        check_groups(batch["group_id"].array, repeat)
    if len(batch) * repeat > MAX_ROWS:
        raise CapacityExceeded(f"{len(batch)} rows {repeat} times; one put has at most {MAX_ROWS} rows")
    return _filled(batch, repeat, put_id)


def check_groups(groups: Int64s, repeat: int) -> None:
    """Refuse group ids that cannot be, one for each row of a batch."""
    if np.any(groups >= _MAX_GROUP):
        raise SchemaError(f"group ids are below {_MAX_GROUP}")
    if repeat > 1 and len(np.unique(groups)) != len(groups):
        raise SchemaError("with repeat each row of the batch is a group of its own: a group_id stands twice")


def check_write(schema: Schema, rows: Int64s, batch: Batch) -> None:
    """Refuse cells that do not fit the columns or the rows that they are for."""
    schema.check(batch.dtypes)
    if len(batch) != len(rows):
        raise SchemaError(f"{len(batch)} values for {len(rows)} rows")
    if len(np.unique(rows)) != len(rows):
        raise SchemaError("a row is named twice in one write")


def _filled(batch: Batch, repeat: int, put_id: bytes) -> Intake:
    count = len(batch)
    given = _few(count) if count <= _FEW else _identity(count)
    filled = {name: column for name, column in given.items() if name not in batch}
    if repeat == 1:
        return Intake(put_id, batch.with_columns(filled), _NOTHING, repeat)
    own = {"rollout_id": np.arange(repeat), "segment": np.zeros(repeat, np.int64)}
    shared = {name: column for name, column in filled.items() if name not in own}
    return Intake(put_id, batch.with_columns(shared), Batch(own), repeat)


def _identity(count: int) -> dict[str, Column]:
    """Return what a put gets that does not say otherwise."""
    zeros = Column.infer(np.zeros(count, np.int64))
    unnamed = Column.infer(np.full(count, -1))
    return {"source": blank(count), "prompt_id": unnamed, "rollout_id": zeros, "segment": zeros}


_few = lru_cache(maxsize=64)(_identity)


def blank(count: int) -> Column:
    """Return so many empty strings."""
    return Column.ragged(np.empty(0, np.uint8), np.zeros(count + 1, np.int64), "string")
