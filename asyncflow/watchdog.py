"""What a run that stands still waits for: which stage, which rows, which columns, and who holds them.

It is looked at by whoever waits, a few times in the time after which it barks, and needs no thread. Rows that are
put, written, done or dropped are movement as much as what replicas say: a long batch is no stall.
"""

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

from asyncflow.pipeline import IDENTITY, Graph, StageSpec
from asyncflow.storage.client import Found, Table
from asyncflow.storage.status import TableStatus
from asyncflow.types import Int64s

log = logging.getLogger(__name__)
_LOOKS = 4
"""Looks in the time after which nothing has moved for too long."""
_SHOWN = 5


@dataclass(slots=True)
class Watchdog:
    """Warns once each time when nothing has moved for `seconds`."""

    seconds: float
    graphs: Mapping[str, Graph]
    """By table."""
    tables: Mapping[str, Table]
    _since: float = field(default_factory=time.monotonic, init=False)
    _seen: object = field(default=None, init=False)
    _report: str = field(default="", init=False)

    @property
    def pause(self) -> float:
        """Seconds between two looks."""
        return self.seconds / _LOOKS

    @property
    def stalled(self) -> str:
        """What the last warning said, to stand behind an error, while nothing has moved since."""
        return f"; {self._report}" if self._report else ""

    def moved(self) -> None:
        """Hear that something happened."""
        self._since, self._seen, self._report = time.monotonic(), None, ""

    def look(self, what: Callable[[], str]) -> None:
        """See whether anything moves; `what` says for what the flow waits."""
        now = time.monotonic()
        if self._report or now - self._since < self.pause:
            return
        seen = self._picture()
        if seen != self._seen:
            self.moved()
            self._seen = seen
        elif now - self._since >= self.seconds:
            self._report = f"nothing has moved for {now - self._since:.3g} s:{self.describe()}"
            log.warning("waiting for %s; %s", what(), self._report)

    def describe(self) -> str:
        """Say of every stage that waits which rows lack what, and who holds them; a line for each."""
        lines = [
            f"table {name}: {line}"
            for name, table in self.tables.items()
            for line in _lines(self.graphs[name], table.find(), table.status())
        ]
        return "".join(f"\n  {line}" for line in lines or ["no stage waits for rows, and none has any"])

    def _picture(self) -> object:
        return [
            (found.rows.tobytes(), found.written.tobytes(), [(task.done, task.leased) for task in tasks.values()])
            for table in self.tables.values()
            for found, tasks in [(table.find(), table.status().tasks)]
        ]


def _lines(graph: Graph, found: Found, status: TableStatus) -> Iterator[str]:
    writers = {column: stage.name for stage in graph.stages for column in stage.writes}
    for stage in graph.stages:
        lacks = list(_lacks(stage, writers, found, status))
        wanted = next((wait.wanted for wait in status.waits if wait.task == stage.name), None)
        if lacks:
            yield f"stage {stage.name} waits for {wanted or 'its replica'}: {'; '.join(lacks)}"
        elif stage.build and _holders(stage.name, status):
            yield f"stage {stage.name} works on {_holders(stage.name, status)}"
        elif stage.build and status.tasks[stage.name].waiting and wanted is None:
            yield f"stage {stage.name} has {status.tasks[stage.name].waiting} rows ready, and no replica asks for them"


def _lacks(stage: StageSpec, writers: Mapping[str, str], found: Found, status: TableStatus) -> Iterator[str]:
    """Say which rows lack which columns that a stage reads, writer by writer."""
    columns = [column for column in stage.reads if column not in IDENTITY]
    for writer in dict.fromkeys(writers[column] for column in columns):
        missing = [column for column in columns if writers[column] == writer and not found.has([column]).all()]
        rows = found.rows[~found.has(missing)]
        if len(rows):
            held = _holders(writer, status) or f"nobody holds them for stage {writer}"
            yield f"{len(rows)} rows lack {', '.join(missing)} ({_named(rows)}; {held})"


def _holders(stage: str, status: TableStatus) -> str:
    own = [holding for holding in status.holdings if holding.task == stage]
    return ", ".join(
        f"{holding.rows} rows held by {holding.consumer} for {holding.seconds:.3g} s" for holding in own[:_SHOWN]
    )


def _named(rows: Int64s) -> str:
    names = ", ".join(map(str, np.sort(rows)[:_SHOWN].tolist()))
    return f"row{'s' if len(rows) > 1 else ''} {names}{', …' if len(rows) > _SHOWN else ''}"
