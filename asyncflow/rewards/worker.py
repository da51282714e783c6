"""The process in which a reward function runs, and the board on which it tells how far it is.

The board is memory shared with the parent: which row is being scored, since when, and the results so far. It costs
nothing per row, and it outlives the process: whatever kills the worker, the parent knows which rows have a score and
which row was being scored. Only texts (of errors) and the start and end of a chunk travel over the pipe.
"""

import ctypes
import os
import signal
import threading
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing import connection, process
from typing import TypeAlias

from asyncflow.errors import ConfigError
from asyncflow.rewards.signature import Sample, Scorer
from asyncflow.rewards.spec import RewardSpec

CHUNK = 64
"""Most rows that a worker is given at a time."""

PENDING, OK, ERROR, UNSCORED = range(4)
NO_ROW = -1


class Board(ctypes.Structure):
    """State of one chunk.

    A row's value is written before its status, and its status before `row` moves on: a pending row that `row` names was
    being scored. `since` is written before `row`: who reads them in between grants too much time, never too little.
    """

    _fields_ = (
        ("row", ctypes.c_int64),
        ("since", ctypes.c_double),
        ("status", ctypes.c_uint8 * CHUNK),
        ("value", ctypes.c_double * CHUNK),
    )
    row: int
    """Row of the chunk that is being scored, or NO_ROW."""
    since: float
    """Monotonic time at which `row` last changed or is about to."""
    status: "ctypes.Array[ctypes.c_uint8]"
    value: "ctypes.Array[ctypes.c_double]"

    def reset(self) -> None:
        """Make ready for a chunk."""
        ctypes.memset(self.status, PENDING, CHUNK)
        self.row, self.since = NO_ROW, time.monotonic()


@dataclass(frozen=True, slots=True)
class Ready:
    """The function is made; rows may come."""


@dataclass(frozen=True, slots=True)
class Refused:
    """The function could not be made."""

    error: ConfigError | None
    """The mistake, where it is one of the configuration."""
    report: str


@dataclass(frozen=True, slots=True)
class Failed:
    """The function raised for a row."""

    row: int
    detail: str
    report: str


@dataclass(frozen=True, slots=True)
class Done:
    """Every row of the chunk has its status."""


Notice: TypeAlias = Ready | Refused | Failed | Done
Row: TypeAlias = tuple[str, str, str, str, str]
"""The fields of a Sample: plain tuples cross ten times as fast."""


def serve(spec: RewardSpec, pipe: "connection.Connection[Notice, Sequence[Row]]", board: Board) -> None:
    """Score chunks until the parent closes the pipe."""
    _detach()
    try:
        scorer = spec.scorer()
    except Exception as error:  # noqa: BLE001 - the border of a process: it travels to the parent
        pipe.send(Refused(error if isinstance(error, ConfigError) else None, traceback.format_exc()))
        return
    pipe.send(Ready())
    while True:
        try:
            rows = pipe.recv()
        except EOFError:
            return
        for row, fields in enumerate(rows):
            board.since, board.row = time.monotonic(), row
            status, board.value[row] = _score(scorer, row, Sample(*fields), pipe)
            board.status[row] = status
        board.since, board.row = time.monotonic(), NO_ROW
        pipe.send(Done())


def _score(
    scorer: Scorer, row: int, sample: Sample, pipe: "connection.Connection[Notice, Sequence[Row]]"
) -> tuple[int, float]:
    try:
        value = scorer(sample)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - likewise, as the outcome of this row
        detail = traceback.format_exception_only(error)[-1].strip()
        pipe.send(Failed(row, detail[:2000], traceback.format_exc()[-20000:]))
        return ERROR, 0.0
    return (UNSCORED, 0.0) if value is None else (OK, value)


def _detach() -> None:
    """Become the head of a session of its own, so that one kill ends also what the function started.

    Ctrl-C does not reach it there; it ends when its parent closes the pipe or is gone.
    """
    os.setsid()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    process.current_process().daemon = False  # a daemon may start no processes, and sandboxes in rewards do
    threading.Thread(target=_end_with_parent, name="end-with-parent", daemon=True).start()


def _end_with_parent() -> None:
    parent = process.parent_process()
    assert parent is not None
    connection.wait([parent.sentinel])
    os.killpg(0, signal.SIGKILL)
