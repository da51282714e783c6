"""The loop that runs a stage: lease rows, call the stage, write its columns, acknowledge."""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from typing import Any

import numpy as np
import numpy.typing as npt

from asyncflow.errors import (
    CellConflict,
    ColumnMissing,
    PipelineError,
    QueueClosed,
    RowGone,
    SchemaError,
    StorageError,
    WaitTimeout,
)
from asyncflow.execute.messages import Dropped, Worked
from asyncflow.pipeline import StageSpec
from asyncflow.stage import Context, Done, Drop, Paced, Part, Piece, Rows, Stage, parts
from asyncflow.storage import Batch, TransferQueue
from asyncflow.storage.client import Lease, Stream, Table
from asyncflow.timing import Timing
from asyncflow.types import Int64s, Version

KEPT = 10
"""Times of other leases for which a stage that keeps its batches has them: those ahead of a step lie for as long."""
_AHEAD = 4
"""Batches that a stage which keeps them asks for at once: the next ones arrive while it works."""


def run(
    spec: StageSpec,
    stage: Stage,
    queue: TransferQueue,
    context: Context,
    opened: Callable[[Stream], None] = lambda stream: None,
    until: Callable[[Lease], bool] = lambda lease: False,
) -> None:
    """Serve one stage until the data ends, the queue closes or the run is stopped, or `until` a lease says so.

    `opened` is told of the stream: closing it ends this. Rows of a lease that an error meets go back, their attempt
    counted; the lease that `until` holds of goes back uncounted.
    """
    table = queue.table(spec.table)
    take, shared = spec.take, spec.ranks > 1
    stream = table.stream(
        spec.name,
        rows=take.rows,
        groups=take.groups,
        whole=take.whole,
        partial=take.partial,
        credit=_AHEAD if spec.gathers else 1,
        consumer=context.replica,
        rank=context.rank if shared else 0,
        ranks=spec.ranks if shared else None,
        split=shared,
    )
    opened(stream)
    gathered = _Gathered()
    with suppress(QueueClosed), closing(stream):
        while not context.stopping.is_set():
            if spec.lanes > 1 and spec.paced and isinstance(stage, Paced):
                stage.await_room()  # the stage is busy, if not this lane: that is no time without rows
            timing = Timing()
            lease = _next(spec, table, stream, context.config.executor.wait_timeout, gathered)
            if lease is None or until(lease):
                return
            timing.lease()
            served = _Served(spec, table, lease, context, gathered, timing)
            with _counted(lease):
                answered = served.by(stage)
            if not answered:
                return
            timing.end()
            context.emit(served.worked())


@contextmanager
def _counted(lease: Lease) -> Iterator[None]:
    """Give a lease back that an error meets, as an attempt: rows that fail every time are dropped in the end."""
    try:
        yield
    except QueueClosed:
        raise
    except BaseException:
        with suppress(StorageError):
            lease.release(failed=True)
        raise


class _Gathered:
    """Leases whose rows a stage has kept; they are renewed in time, however long the rest takes."""

    def __init__(self) -> None:
        self.leases: list[Lease] = []
        self._renewed = time.monotonic()

    def renew(self, seconds: float) -> None:
        """Let them run for so many seconds, if a quarter of that is over."""
        now = time.monotonic()
        if now - self._renewed >= seconds / 4:
            self._renewed = now
            for lease in self.leases:
                lease.extend(KEPT * seconds)


def _next(spec: StageSpec, table: Table, stream: Stream, timeout: float, gathered: _Gathered) -> Lease | None:
    """Wait for rows; the bound counts only while there are rows that the stage is to get and nobody holds."""
    while True:
        gathered.renew(timeout)
        try:
            return stream.next(timeout=timeout / 4 if gathered.leases else timeout)
        except WaitTimeout:
            rows = table.status().tasks[spec.name]
            if rows.leased or not rows.waiting + rows.blocked:
                continue
            raise


class _Served:
    """One lease in the hands of a stage."""

    def __init__(
        self, spec: StageSpec, table: Table, lease: Lease, context: Context, gathered: _Gathered, timing: Timing
    ) -> None:
        self.spec, self.table, self.lease, self.context, self.timing = spec, table, lease, context, timing
        self.gathered = gathered
        """Leases of before, whose rows the stage has kept, if it gathers."""
        self.answered = np.zeros(len(lease.rows), dtype=bool)
        self.finished = False
        self.step: Version | None = None
        """The version that was made of the batch, and of those before it that were gathered."""

    def by(self, stage: Stage) -> bool:
        """Let the stage answer every row; False if the run is stopping and some rows are not answered."""
        batch = self.lease.batch.with_columns({"row": self.lease.rows})
        for part in parts(stage.process(batch), len(self.lease.rows), self.spec.name):
            columns = self.columns(part)
            with self.timing.waiting():
                if isinstance(part, Done):
                    self.finish(part.step)
                else:
                    self.take(part, columns)
        if self.spec.gathers and not self.finished:
            self.gathered.leases.append(self.lease)
            return not self.context.stopping.is_set()
        with self.timing.waiting():
            return self.finished or self.complete()

    def worked(self) -> Worked:
        """Say how long this took."""
        spec, context, timing = self.spec, self.context, self.timing
        return Worked(
            spec.table,
            spec.name,
            context.replica,
            len(self.lease.rows),
            timing.busy,
            timing.idle,
            timing.blocked,
            started=timing.started,
            lane=context.lane,
            version=self.step,
            waits=timing.waits,
        )

    def complete(self) -> bool:
        """Acknowledge a batch all of whose rows were answered; a stage that writes nothing answers by returning."""
        stopping = self.context.stopping.is_set()
        if not self.answered.all() and (self.spec.writes or self.spec.durable):
            if stopping:
                return False
            missing = self.lease.rows[~self.answered]
            raise PipelineError(
                f"stage {self.spec.name} left {missing.size} of {self.answered.size} rows without an answer, "
                f"the first is row {missing[0]}: return columns for every row, or drop rows with a reason"
            )
        self.finish(None)
        return True

    def finish(self, step: Version | None) -> None:
        """Acknowledge the whole batch, once, and all that was gathered before it."""
        self.lease.done(step=step, others=self.gathered.leases)
        self.gathered.leases.clear()
        self.finished, self.step = True, step

    def columns(self, part: Piece) -> Batch:
        """Return the columns of a part; a drop by a stage that may not drop is refused here, too."""
        if isinstance(part, Part | Rows):
            return self.matching(part.columns, len(part.positions if isinstance(part, Part) else part.rows))
        if isinstance(part, Drop) and len(part.positions) and not self.spec.drops:
            raise PipelineError(
                f"stage {self.spec.name} drops row {self.lease.rows[part.positions[0]]} ({part.reason}), which may be "
                "trained already: only a stage that writes a column, and comes before the trainer, may drop rows"
            )
        return Batch({}, rows=0)

    def take(self, part: Part | Rows | Drop, columns: Batch) -> None:
        """Write or drop the rows of a part."""
        if isinstance(part, Rows):
            self.write(part.rows, columns)
            return
        rows = self.lease.rows[part.positions]
        if self.answered[part.positions].any() or len(np.unique(part.positions)) < len(part.positions):
            raise PipelineError(f"stage {self.spec.name} answered row {rows[0]} or one beside it twice")
        self.answered[part.positions] = True
        if isinstance(part, Part):
            self.write(rows, columns, self.lease)
            return
        self.drop(part.positions[self.lacking(rows)], part.reason)

    def write(self, rows: Int64s, columns: Batch, lease: Lease | None = None) -> None:
        """Write columns of rows, but for those that another stage has dropped meanwhile, or that have them already.

        A replica that ended before it acknowledged its rows may have written some: they came again, and keep what they
        were given first, by which others may have gone on.
        """
        while len(rows):
            try:
                self.table.write(rows, columns, lease=lease)
                return
            except (CellConflict, RowGone):
                left = self.lacking(rows)
                if left.all():
                    raise
                rows, columns = rows[left], columns.take(np.flatnonzero(left))

    def drop(self, positions: Int64s, reason: str) -> None:
        """Drop rows of the batch."""
        rows = self.lease.rows[positions]
        if not len(rows):
            return
        lengths = self.lengths(rows)
        self.lease.drop(rows, reason)
        groups = self.lease.batch["group_id"].array[positions]
        self.context.emit(
            Dropped(self.spec.table, self.spec.name, reason, tuple(groups.tolist()), tuple(rows.tolist()), lengths)
        )

    def lengths(self, rows: Int64s) -> tuple[int, ...]:
        """Return how long the responses of rows are, read while they are there; nothing if they have none."""
        try:
            lengths: list[int] = self.table.read(rows, ["response_tokens"])["response_tokens"].lengths.tolist()
        except (ColumnMissing, RowGone, SchemaError):
            return ()
        return tuple(lengths)

    def lacking(self, rows: Int64s) -> npt.NDArray[np.bool_]:
        """Return which rows live, and lack the columns that the stage writes."""
        found = self.table.find()
        living = found.rows
        if self.spec.writes:
            living = living[~found.has(list(self.spec.writes))]
        return np.isin(rows, living)

    def matching(self, given: Batch | Mapping[str, Any], rows: int) -> Batch:
        """Refuse columns that are not those declared, or that have another number of values than there are rows."""
        columns = given if isinstance(given, Batch) else Batch(given)
        declared, returned = set(self.spec.writes), set(columns.names)
        if declared != returned:
            raise PipelineError(
                f"stage {self.spec.name} declares that it writes {sorted(declared)} and returned {sorted(returned)}"
            )
        if len(columns) != rows:
            raise PipelineError(f"stage {self.spec.name} returned {len(columns)} values for {rows} rows")
        return columns
