"""Metrics of a run: one JSON line a step, and the share of time that each stage worked.

A record's numbers outside `time` depend on the configuration and the seed alone; everything that the clock decides
stands under `time`, so that two runs can be compared line by line.
"""

import json
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TextIO

from asyncflow.execute.messages import Worked

Record = dict[str, Any]


def _whole(lines: Sequence[str]) -> Iterator[Record]:
    """A process that was killed may have left a line half-written: what follows it is of no use either."""
    for line in lines:
        try:
            yield json.loads(line)
        except ValueError:
            return


def _plain(value: Any) -> Any:
    """JSON has no NaN and no infinity: what is not a number becomes null."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


@dataclass(slots=True)
class StageTime:
    """What the replicas of a stage did with their time, in seconds, and how many rows they finished."""

    rows: int = 0
    busy: float = 0.0
    idle: float = 0.0
    blocked: float = 0.0

    def add(self, worked: Worked) -> None:
        """Count one batch."""
        self.rows += worked.rows
        self.busy += worked.busy
        self.idle += worked.idle
        self.blocked += worked.blocked

    def shares(self) -> dict[str, float]:
        """Shares of the time, which add up to 1."""
        total = (self.busy + self.idle + self.blocked) or 1.0
        return {"busy": self.busy / total, "idle": self.idle / total, "blocked": self.blocked / total}


@dataclass(slots=True)
class Metrics:
    """Collects the records of a run and writes each to `metrics.jsonl` as it comes. Thread-safe."""

    path: Path
    records: list[Record] = field(default_factory=list)
    stages: dict[str, StageTime] = field(default_factory=dict)
    started: float = field(default_factory=time.monotonic)
    listeners: list[Callable[[Record], None]] = field(default_factory=list)
    """Called with each record, in the thread that logs it."""
    _since: dict[str, float] = field(default_factory=dict)
    _file: TextIO | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def restore(self, version: int) -> None:
        """Go on with the records that the file has up to a version of the weights."""
        with self._lock:
            lines = self.path.read_text(encoding="utf-8").splitlines() if self.path.exists() else []
            self.records = [record for record in _whole(lines) if record["version"] <= version]
            partial = self.path.with_suffix(".partial")
            partial.write_text("".join(json.dumps(record) + "\n" for record in self.records), encoding="utf-8")
            partial.replace(self.path)

    def worked(self, worked: Worked) -> None:
        """Count a batch of the train table for the stage, and for the step that is running."""
        if worked.table != "train":
            return
        with self._lock:
            if worked.stage not in self.stages:  # before its first rows a stage waited for the run to begin
                worked = replace(worked, idle=0.0)
            self.stages.setdefault(worked.stage, StageTime()).add(worked)
            self._since[worked.stage] = self._since.get(worked.stage, 0.0) + worked.busy

    def log(self, kind: str, values: Mapping[str, Any], clock: Mapping[str, float] | None = None) -> Record:
        """Add a record of a kind (`step`, `warmup`, `eval`); `clock` holds what depends on the clock."""
        with self._lock:
            timing = {"elapsed": time.monotonic() - self.started, **(clock or {})}
            if kind == "step":
                timing |= {f"{stage}_busy": seconds for stage, seconds in self._since.items()}
                self._since.clear()
            record: Record = {"kind": kind, **{key: _plain(value) for key, value in values.items()}}
            record["time"] = {key: round(value, 4) for key, value in timing.items()}
            self.records.append(record)
            if self._file is None:
                self._file = self.path.open("a", encoding="utf-8")
            self._file.write(json.dumps(record, allow_nan=False) + "\n")
            self._file.flush()
        for listener in self.listeners:
            listener(record)
        return record

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
