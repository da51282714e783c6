"""Responses that are finished and not trained: what a checkpoint keeps of the queue, so that none is made again.

Kept are whole groups whose rows have all that the trainer reads. What was dropped of a group is not known to a run that
goes on, and what is half done is soon made again; such groups begin anew, as does all that is not in the file.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

from asyncflow.errors import CheckpointError
from asyncflow.pipeline import IDENTITY, Graph, StageSpec, awaited
from asyncflow.storage import Batch
from asyncflow.storage.client import Table
from asyncflow.types import Int64s

_LAST = "advantage"
"""What rows lack until training begins, so that the trainer does not begin before."""


def collect(table: Table, graph: Graph, groups: Iterable[int], size: int) -> Batch | None:
    """Return the rows of those groups that are finished, `size` rows each; None if there is none."""
    names = [name for stage in _before(graph) for name in stage.writes]
    found = table.find(sorted(groups))
    there = found.has(names)
    numbers, counts = np.unique(found.groups[there], return_counts=True)
    rows = found.rows[there & np.isin(found.groups, numbers[counts == size])]
    if not len(rows):
        return None
    return table.read(rows, [*(name for name in IDENTITY if name != "row"), *names])


def write(rows: Batch, path: Path) -> None:
    """Write rows into a file."""
    records = rows.to_arrow()
    path.parent.mkdir(parents=True, exist_ok=True)
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, records.schema) as target:
        target.write_batch(records)


def read(path: Path) -> Batch | None:
    """Return the rows of a file, None if there is none; CheckpointError if it is damaged."""
    if not path.exists():
        return None
    try:
        return Batch.from_arrow(pa.ipc.open_file(path.read_bytes()).get_batch(0))
    except (pa.ArrowException, OSError, ValueError, IndexError) as error:
        raise CheckpointError(f"{path} is damaged: {error}; without it, its responses are generated again") from error


@dataclass(frozen=True, slots=True)
class Returned:
    """Rows that are back in the table, and wait for training to begin."""

    ids: Int64s
    groups: Int64s
    """Group of each row."""
    _rows: Batch
    _table: Table

    @classmethod
    def to(cls, table: Table, graph: Graph, rows: Batch) -> "Returned":
        """Put rows into an empty table whose tasks nobody serves yet: all stages before the trainer are done with them.

        A group comes as a whole or not at all.
        """
        ids = table.put(rows.select([name for name in rows.names if name != _LAST]))
        for stage in _before(graph):
            if stage.build:
                _done(table, stage, len(ids))
        return cls(ids, rows["group_id"].array, rows.select([_LAST]), table)

    def begin(self) -> None:
        """Let the trainer have them."""
        self._table.write(self.ids, self._rows)


def _done(table: Table, stage: StageSpec, rows: int) -> None:
    """Acknowledge all rows in the place of a stage."""
    groups = bool(stage.take.groups)
    with table.stream(stage.name, None if groups else rows, rows if groups else None, partial=True) as stream:
        lease = stream.next()
        assert lease is not None
        lease.done()


def _before(graph: Graph) -> list[StageSpec]:
    before = awaited(graph.stages, "train")
    return [stage for stage in graph.stages if stage.name in before]
