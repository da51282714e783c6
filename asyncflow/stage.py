"""What a stage is, and what it may answer.

A stage sees batches and gives back columns; it never sees the queue, other stages or the executor. Rows and
columns are joined by row key: a part names the positions of its batch that it answers, so that a stage may
finish rows in any order. A row that was neither answered nor dropped when the call ends is an error, but for a stage
that gathers batches until it is done with all of them.
"""

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast, runtime_checkable

import numpy as np

from asyncflow.errors import PipelineError
from asyncflow.execute.messages import Event
from asyncflow.storage import Batch
from asyncflow.types import Int64s, Version

if TYPE_CHECKING:
    from asyncflow.config.model import Pipeline

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Part:
    """Columns for some rows of a batch."""

    positions: Int64s
    """Which rows of the batch, in the order of the columns."""
    columns: Batch | Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Rows:
    """Columns for rows of this batch, or of one before it that the stage has gathered."""

    rows: Int64s
    """Row ids, in the order of the columns."""
    columns: Batch | Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Drop:
    """Rows of a batch that end here, with the reason that the ledger shows."""

    positions: Int64s
    reason: str


@dataclass(frozen=True, slots=True)
class Done:
    """The batch, with all that was gathered before it, took effect in this step; rows stay until it is committed."""

    step: Version


Piece = Part | Rows | Drop | Done
Answer = Batch | Mapping[str, Any] | Iterable[Piece] | None


class Resources:
    """What the stages of one process share, such as an engine: made once, by whoever asks first."""

    def __init__(self) -> None:
        self._made: dict[str, object] = {}
        self._lock = threading.Lock()

    def share(self, name: str, make: Callable[[], T]) -> T:
        """Return what was made under this name, or make it."""
        with self._lock:
            if name not in self._made:
                self._made[name] = make()
            return cast("T", self._made[name])


@dataclass(frozen=True, slots=True)
class Context:
    """What a stage may know of its surroundings."""

    config: "Pipeline"
    replica: str
    """Name of this running copy, for example `rollout-0`."""
    folder: Path
    """The run's folder."""
    emit: Callable[[Event], None]
    """Tells the flow what happened."""
    resume: Path | None = None
    """Checkpoint that the run goes on from."""
    rank: int = 0
    """Which of the ranks this is, where the replicas of a stage share each batch."""
    rendezvous: str = ""
    """Where those ranks find each other."""
    options: Mapping[str, object] = field(default_factory=dict)
    resources: Resources = field(default_factory=Resources)
    stopping: threading.Event = field(default_factory=threading.Event)
    """Set when the run is to end early: long work should return soon."""
    again: bool = False
    """Whether another copy of this name has failed before in this run."""
    lane: int = 0
    """Which of the batches that the stage works on at once."""


@runtime_checkable
class Stage(Protocol):
    """A function from some columns to others, with a life around it."""

    def setup(self, context: Context) -> None:
        """Load what is needed; called once, before the first batch."""

    def process(self, batch: Batch) -> Answer:
        """Return the columns of all rows of the batch, or yield parts as they are finished."""

    def close(self) -> None:
        """Free what `setup` took; idempotent."""


@runtime_checkable
class Paced(Protocol):
    """A stage whose lanes take rows when it has room for them."""

    def await_room(self) -> None:
        """Return when this lane may take its next batch; QueueClosed once the stage has ended."""


@dataclass(slots=True)
class FunctionStage:
    """A plain function as a stage: it gets the batch and its options, and returns the columns that it writes."""

    function: Callable[..., Answer]
    _options: Mapping[str, object] = field(default_factory=dict)

    def setup(self, context: Context) -> None:
        self._options = context.options

    def process(self, batch: Batch) -> Answer:
        return self.function(batch, **self._options)

    def close(self) -> None:
        return None


Function = TypeVar("Function", bound=Callable[..., Any])


def stage(*, reads: Iterable[str], writes: Mapping[str, str]) -> Callable[[Function], Function]:
    """Declare the columns that a function reads and writes, so that it can stand in a pipeline as a stage.

    The function gets a `Batch` with the columns of `reads` and the identity columns, and returns a `Batch` or a
    mapping with the columns of `writes` (name to dtype), one value a row.
    """

    if isinstance(reads, str) or not all(isinstance(name, str) for name in (*reads, *writes, *writes.values())):
        raise PipelineError(
            "a stage reads a list of column names, and writes a mapping of names to dtypes, all of them text"
        )

    def declare(function: Function) -> Function:
        function.asyncflow_reads = tuple(reads)  # type: ignore[attr-defined]
        function.asyncflow_writes = dict(writes)  # type: ignore[attr-defined]
        return function

    return declare


_EXPECTED = "expected a Batch or a mapping with one value a row, or an iterable of Part, Rows, Drop and Done"


def parts(answer: Answer, rows: int, name: str) -> Iterator[Piece]:
    """Bring what a stage returned into one form: a whole answer is one part of all rows.

    PipelineError for what is none, when it comes: user code may return anything.
    """
    if answer is None:
        return
    if isinstance(answer, Batch | Mapping):
        yield Part(np.arange(rows), answer)
        return
    if isinstance(answer, np.ndarray) or not isinstance(answer, Iterable):
        raise PipelineError(f"stage {name} returned {type(answer).__name__}: {_EXPECTED}")
    for piece in answer:
        if not isinstance(piece, Part | Rows | Drop | Done):
            raise PipelineError(f"stage {name} yielded {type(piece).__name__}: {_EXPECTED}")
        if isinstance(piece, Part | Drop):
            _check(piece.positions, rows, name)
        yield piece


def _check(positions: Int64s, rows: int, name: str) -> None:
    found = np.asarray(positions)
    if found.ndim != 1 or (len(found) and found.dtype.kind not in "iu"):
        raise PipelineError(f"stage {name} gave positions of {found.dtype}, {found.shape}: expected a list of int64")
    if len(found) and not (found.min() >= 0 and found.max() < rows):
        raise PipelineError(f"stage {name} answered positions {found.min()} to {found.max()} of a batch of {rows} rows")
