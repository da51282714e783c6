"""What the key-value facade tells of rows: which they are, their tags, and the fields that they have.

`KVBatchMeta` names rows by key, `BatchMeta` by index; both are values, whose methods return new ones.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from asyncflow.errors import SchemaError
from asyncflow.storage.batch import Batch
from asyncflow.types import Int64s

Tag = dict[str, Any]
T = TypeVar("T")


@dataclass
class KVBatchMeta:
    """Rows of one partition by their keys."""

    keys: list[str] = field(default_factory=list)
    tags: list[Tag] = field(default_factory=list)
    partition_id: str | None = None
    fields: list[str] | None = None
    """Fields that all of the rows have, sorted."""
    extra_info: dict[str, Any] | None = field(default_factory=dict)

    def __post_init__(self) -> None:
        if len(self.keys) != len(self.tags):
            raise SchemaError(f"{len(self.tags)} tags for {len(self.keys)} keys")
        if len(set(self.keys)) != len(self.keys):
            raise SchemaError("a key stands twice in one batch")

    def __len__(self) -> int:
        return len(self.keys)

    @property
    def size(self) -> int:
        """Number of rows."""
        return len(self.keys)

    def select_keys(self, keys_to_select: list[str]) -> "KVBatchMeta":
        """Return some of the rows, in this order."""
        tags = dict(zip(self.keys, self.tags, strict=True))
        missing = [key for key in keys_to_select if key not in tags]
        if missing:
            raise SchemaError(f"keys that are not in this batch: {', '.join(missing[:8])}")
        return replace(self, keys=list(keys_to_select), tags=[tags[key] for key in keys_to_select])

    def chunk(self, chunks: int) -> list["KVBatchMeta"]:
        """Return the rows in so many parts of nearly the same size, the first ones larger."""
        return [
            replace(self, keys=_taken(self.keys, part), tags=_taken(self.tags, part))
            for part in _parts(len(self), chunks)
        ]

    @classmethod
    def concat(cls, data: "list[KVBatchMeta]") -> "KVBatchMeta":
        """Join batches of one partition and the same fields."""
        parts = [part for part in data if len(part)]
        if not parts:
            return cls()
        if len({(part.partition_id, tuple(sorted(part.fields or ()))) for part in parts}) > 1:
            raise SchemaError("only rows of one partition with the same fields can be joined")
        info = {key: value for part in parts for key, value in (part.extra_info or {}).items()}
        keys, tags = [key for part in parts for key in part.keys], [tag for part in parts for tag in part.tags]
        return replace(parts[0], keys=keys, tags=tags, extra_info=info)


@dataclass(slots=True)
class BatchMeta:
    """Rows of one partition by their indexes, which grow and are never used again."""

    global_indexes: list[int] = field(default_factory=list)
    partition_ids: list[str] = field(default_factory=list)
    field_names: list[str] = field(default_factory=list)
    production_status: npt.NDArray[np.int8] = field(default_factory=lambda: np.empty(0, np.int8))
    """1 for each row that has all the fields."""
    custom_meta: list[Tag] = field(default_factory=list)
    """The tag of each row."""
    extra_info: dict[str, Any] = field(default_factory=dict)
    cells: Batch | None = field(default=None, repr=False, compare=False)
    """The fields as they came with the rows, so that a read need not fetch them again."""

    def __len__(self) -> int:
        return len(self.global_indexes)

    def __getstate__(self) -> tuple[Any, ...]:
        return tuple(getattr(self, name) for name in self.__slots__ if name != "cells")

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        # Another process reads the cells from the queue: pickled, they would travel twice.
        for name, value in zip(self.__slots__, (*state, None), strict=True):
            setattr(self, name, value)

    @property
    def size(self) -> int:
        """Number of rows."""
        return len(self.global_indexes)

    @property
    def is_ready(self) -> bool:
        """Whether there are rows, and all of them have all the fields."""
        return len(self) > 0 and bool((self.production_status == 1).all())

    @classmethod
    def empty(cls, extra_info: dict[str, Any] | None = None) -> "BatchMeta":
        """Return a batch of no rows."""
        return cls(extra_info=extra_info or {})

    def select_samples(self, sample_indices: list[int]) -> "BatchMeta":
        """Return some of the rows by their place in the batch."""
        at: Int64s = np.asarray(sample_indices, np.int64)
        if len(at) and not (at.min() >= 0 and at.max() < len(self)):
            raise SchemaError(f"places {at.min()} to {at.max()} of a batch of {len(self)} rows")
        return replace(
            self,
            global_indexes=_taken(self.global_indexes, at),
            partition_ids=_taken(self.partition_ids, at),
            production_status=self.production_status[at],
            custom_meta=_taken(self.custom_meta, at),
            cells=None if self.cells is None else self.cells.take(at),
        )

    def select_fields(self, field_names: list[str]) -> "BatchMeta":
        """Return the rows with some of their fields."""
        return replace(self, field_names=sorted(set(field_names) & set(self.field_names)))

    def chunk(self, chunks: int) -> list["BatchMeta"]:
        """Return the rows in so many parts of nearly the same size, the first ones larger."""
        return [self.select_samples(part.tolist()) for part in _parts(len(self), chunks)]


def _parts(rows: int, chunks: int) -> list[Int64s]:
    return np.array_split(np.arange(rows), chunks)


def _taken(values: Sequence[T], at: Int64s) -> list[T]:
    return [values[each] for each in at.tolist()]
