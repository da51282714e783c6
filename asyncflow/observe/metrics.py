"""Metrics of a run: one JSON line a step, and where the time of each replica went.

A record's numbers outside `time` depend on the configuration and the seed alone; everything that the clock decides
stands under `time`, so that two runs can be compared line by line.
"""

import json
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from asyncflow.execute.messages import Worked
from asyncflow.observe.times import Stopwatch, Times

Record = dict[str, Any]


def _whole(lines: Sequence[str]) -> Iterator[Record]:
    """A process that was killed may have left a line half-written: what follows it is of no use either."""
    for line in lines:
        try:
            record = json.loads(line)
        except ValueError:
            return
        if not isinstance(record, dict) or not isinstance(record.get("version"), int) or "kind" not in record:
            return
        yield record


def _plain(value: Any) -> Any:
    """JSON has no NaN and no infinity: what is not a number becomes null."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


@dataclass(slots=True)
class Metrics:
    """Collects the records of a run and writes each to `metrics.jsonl` as it comes. Thread-safe."""

    path: Path
    records: list[Record] = field(default_factory=list)
    started: float = field(default_factory=time.monotonic)
    listeners: list[Callable[[Record], None]] = field(default_factory=list)
    """Called with each record, in the thread that logs it."""
    _stopwatch: Stopwatch = field(default_factory=Stopwatch)
    _before: Times = field(default_factory=Times)
    """How the time was spent up to the last step."""
    _logged: float = field(default_factory=time.monotonic)
    """When the last record was."""
    _file: TextIO | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def restore(self, version: int) -> None:
        """Go on with the records that the file has up to a version of the weights."""
        with self._lock:
            lines = self.path.read_text(encoding="utf-8", errors="replace").splitlines() if self.path.exists() else []
            self.records = [record for record in _whole(lines) if record["version"] <= version]
            partial = self.path.with_suffix(".partial")
            partial.write_text("".join(json.dumps(record) + "\n" for record in self.records), encoding="utf-8")
            partial.replace(self.path)

    def worked(self, worked: Worked) -> None:
        """Count a batch for its replica, and for the step that is running."""
        with self._lock:
            self._stopwatch.add(worked)

    @property
    def times(self) -> Times:
        """What every replica did with its time so far."""
        with self._lock:
            return self._stopwatch.times()

    def log(
        self, kind: str, values: Mapping[str, Any], clock: Mapping[str, float] | None = None, *, beside: bool = False
    ) -> Record:
        """Add a record of a kind (`step`, `warmup`, `eval`); `clock` holds what depends on the clock.

        What went on `beside` the step that is running takes nothing from its time.
        """
        with self._lock:
            now = time.monotonic()
            timing = {"elapsed": now - self.started, **(clock or {})}
            record: Record = {"kind": kind, **{key: _plain(value) for key, value in values.items()}}
            record["time"] = {key: round(value, 4) for key, value in timing.items()}
            if kind == "step":
                record["time"] |= self._step_time(values, now - self._logged)
            self._logged = self._logged if beside else now
            self.records.append(record)
            if self._file is None:
                self._file = self.path.open("a", encoding="utf-8")
            self._file.write(json.dumps(record, allow_nan=False) + "\n")
            self._file.flush()
        for listener in self.listeners:
            listener(record)
        return record

    def _step_time(self, values: Mapping[str, Any], seconds: float) -> dict[str, Any]:
        """Return what the clock says of a step that took so long, and begin to count the next one."""
        times = self._stopwatch.times()
        since, self._before = times.plus(self._before, -1), times
        busy = {stage: sum(spent.busy for spent in own.values()) for stage, own in since.stages.items()}
        return {
            "seconds": round(seconds, 4),
            "tokens_per_s": round(values.get("tokens", 0.0) / max(seconds, 1e-6), 1),
            **{f"{stage}_busy": round(spent, 4) for stage, spent in busy.items()},
            "ms_per_s": since.per_second(),
        }

    def of(self, kind: str) -> list[Record]:
        """Records of a kind, oldest first."""
        with self._lock:
            return [record for record in self.records if record["kind"] == kind]

    def close(self) -> None:
        """Close the file; idempotent."""
        with self._lock:
            if self._file is not None:
                self._file.close()
                self._file = None
