"""What happened when: a line of `trace.jsonl` for each batch, and for what replicas and the flow do beside them.

Times are whole microseconds since the file was opened, by CLOCK_MONOTONIC, which the processes of one host share.
Lines are written a buffer at a time, and all of them at the end of a step, of a phase and of the run; a run that goes
on adds a segment to the file. There is one line for a batch, whatever its rows are.
"""

import logging
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self, TypeAlias

import msgspec

from asyncflow.execute.messages import Event, Traced, Worked
from asyncflow.observe.metrics import Record

log = logging.getLogger(__name__)
TRACE = "trace.jsonl"
_ENCODER = msgspec.json.Encoder()


class Begun(msgspec.Struct, tag="begun", frozen=True):
    """A segment: this process has begun to write."""

    wall: float
    """Seconds since 1970."""


class Batch(msgspec.Struct, tag="batch", frozen=True, omit_defaults=True):
    """A lane of a replica waited for rows, and worked on them."""

    replica: str
    table: str
    stage: str
    lane: int
    rows: int
    started: int
    """When it began to wait."""
    leased: int
    """When it had them."""
    ended: int
    blocked: int
    """Microseconds of waiting for the queue in between."""
    waits: list[tuple[int, int]] = []
    """When the longest of them began and ended."""
    version: int | None = None
    """Which one a step made with them."""


class Span(msgspec.Struct, tag="span", frozen=True):
    """Something else that took time."""

    replica: str
    lane: str
    name: str
    started: int
    ended: int
    facts: dict[str, float] = {}


class Step(msgspec.Struct, tag="step", frozen=True):
    """The record of a step was written."""

    at: int
    kind: str
    step: int
    version: int
    rows: int
    """Rows of the train table that left with it, the dropped ones included."""
    staleness: float


Line: TypeAlias = Begun | Batch | Span | Step
FLOW = "flow"
"""Where the phases of the run are shown, beside the replicas."""


class Trace:
    """Writes the trace of a run. Thread-safe; without a path it only knows the phase."""

    def __init__(self, path: Path | None = None) -> None:
        self.phase = "starting"
        self._began = self._entered = time.monotonic()
        self._lock = threading.Lock()
        self._file: BinaryIO | None = None if path is None else _opened(path)
        self._write(Begun(time.time()))

    def enter(self, phase: str) -> None:
        """Note that the run does something else from now on."""
        with self._lock:
            if phase != self.phase:
                self._leave()
                self.phase = phase

    def take(self, replica: str, event: Event) -> None:
        """Write an event down, if it took time."""
        if self._file is None:
            return
        if isinstance(event, Worked):
            self._write(self._batch(replica, event))
        elif isinstance(event, Traced):
            started, ended = self._at(event.started), self._at(event.started + event.seconds)
            self._write(Span(replica, event.lane, event.name, started, ended, dict(event.facts)))

    def record(self, record: Record) -> None:
        """Write down that a step has its record, and everything before it."""
        if record["kind"] not in ("step", "warmup"):
            return
        left = int(record["rows"] + record.get("rows_dropped", 0)) if record["kind"] == "step" else 0
        age = record.get("staleness_mean") or 0.0
        step = Step(self._at(time.monotonic()), record["kind"], record["step"], record["version"], left, age)
        with self._lock:
            self._put(step)
            self._flush()

    def close(self) -> None:
        """Write what is left, and close the file; idempotent."""
        with self._lock:
            if self._file is not None:
                self._leave()
            if self._file is not None:
                self._attempt(self._file.close)
                self._file = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _batch(self, replica: str, worked: Worked) -> Batch:
        leased = worked.started + worked.idle
        return Batch(
            replica,
            worked.table,
            worked.stage,
            worked.lane,
            worked.rows,
            self._at(worked.started),
            self._at(leased),
            self._at(leased + worked.busy + worked.blocked),
            int(1e6 * worked.blocked),
            [(self._at(began), self._at(ended)) for began, ended in worked.waits],
            worked.version,
        )

    def _leave(self) -> None:
        entered, self._entered = self._entered, time.monotonic()
        self._put(Span(FLOW, "phases", self.phase, self._at(entered), self._at(self._entered)))
        self._flush()

    def _at(self, moment: float) -> int:
        return int(1e6 * (moment - self._began))

    def _write(self, line: Line) -> None:
        with self._lock:
            self._put(line)

    def _put(self, line: Line) -> None:
        if self._file is not None:
            self._attempt(partial(self._file.write, _ENCODER.encode(line) + b"\n"))

    def _flush(self) -> None:
        if self._file is not None:
            self._attempt(self._file.flush)

    def _attempt(self, write: Callable[[], object]) -> None:
        """Write, or give the trace up: a full disk is no reason to end the run for it."""
        try:
            write()
        except OSError as error:
            log.warning("no more is traced: %s", error)
            self._file = None


def _opened(path: Path) -> BinaryIO:
    """Open the file to go on with it; a line that was cut off stays one."""
    file = path.open("a+b")
    if file.tell():
        file.seek(-1, 2)
        if file.read(1) != b"\n":
            file.write(b"\n")
    return file
