"""A pool of processes that score, each of which can be killed: one outcome for each row, whatever the function does.

Rows go to workers in chunks, and each worker shows on its board which row it is at (see `worker`). The parent sleeps
until a worker reports, dies, or its current row's time is up; then it kills the process, gives that row the outcome
`timeout`, and hands the rest of the chunk to others. A row that finished between the look at the board and the kill
keeps its score, and one that had only just begun is scored again. A worker that dies by itself costs the row that it
was at (`error`); other rows are scored once. Starting a worker has a limit of its own and counts for no row.
"""

import itertools
import multiprocessing
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing import connection
from typing import Any

from asyncflow.errors import RewardError, WaitTimeout
from asyncflow.execute.spawn import pipe, spawn
from asyncflow.rewards.outcome import Outcome, Status
from asyncflow.rewards.signature import Sample
from asyncflow.rewards.spec import RewardSpec
from asyncflow.rewards.worker import (
    CHUNK,
    ERROR,
    NO_ROW,
    OK,
    PENDING,
    UNSCORED,
    Board,
    Done,
    Failed,
    Notice,
    Ready,
    Refused,
    Row,
    serve,
)

__all__ = ["Outcome", "RewardPool", "RewardSpec", "Sample"]

_NAMES: dict[int, Status] = {OK: "ok", ERROR: "error", UNSCORED: "unscored"}
_IDLE_LIMIT = 30.0  # a worker that has rows and begins none for so long is stuck outside the user's function
_GRACE = 2.0  # for an idle worker to end by itself when the pool is closed
_STILLBORN = 3  # workers in a row that die or stick without beginning a row


class RewardPool:
    """Scores samples in `workers` processes; a row that takes more than `timeout` seconds costs its process."""

    def __init__(self, fn: RewardSpec, workers: int = 1, timeout: float = 5.0, start_timeout: float = 120.0) -> None:
        self._spec, self._count = fn, workers
        self._timeout, self._start_timeout = timeout, start_timeout
        self._workers: list[_Worker] = []
        self._lock = threading.Lock()
        self._closed = False
        self.replaced = 0
        """Workers that have ended or were killed since the start; others came in their place."""

    def start(self) -> None:
        """Start the workers and wait for them; ConfigError if the function cannot be found or does not fit."""
        with self._lock:
            self._fill(self._count)
            while waiting := [worker for worker in self._workers if not worker.ready]:
                self._wait(waiting)
                for worker in waiting:
                    self._greet(worker)

    def score(self, samples: Sequence[Sample]) -> list[Outcome]:
        """Return an outcome for each sample, in their order."""
        with self._lock:
            return _Round(self, samples).run()

    def close(self) -> None:
        """End all processes, also from another thread while `score` runs (which then raises); idempotent."""
        self._closed = True
        for worker in tuple(self._workers):
            if worker.rows or not worker.ready:
                worker.signal()
        with self._lock:
            self._end()

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids of the workers."""
        return tuple(worker.pid for worker in self._workers)

    def _end(self) -> None:
        self._closed = True
        for worker in self._workers:
            worker.dismiss()
        grace = time.monotonic() + _GRACE
        while running := [worker.sentinel for worker in self._workers if not worker.gone]:
            if not connection.wait(running, max(0.0, grace - time.monotonic())):
                break
        for worker in self._workers:
            worker.end()
        self._workers.clear()

    def _fill(self, count: int) -> None:
        if self._closed:
            raise RewardError("the reward pool is closed")
        while len(self._workers) < count:
            self._workers.append(_Worker(self._spec, self._start_timeout))

    def _wait(self, workers: Sequence["_Worker"]) -> None:
        deadline = min(worker.look(self._timeout) for worker in workers)
        handles = [handle for worker in workers for handle in (worker.pipe, worker.sentinel)]
        connection.wait(handles, max(0.0, deadline - time.monotonic()))

    def _greet(self, worker: "_Worker") -> None:
        """See whether a new worker is ready; one that cannot start ends the pool."""
        problem: Exception | None = None
        for notice in worker.notices():
            if isinstance(notice, Refused):
                problem = notice.error or RewardError(f"the reward function cannot be made:\n{notice.report}")
        if not worker.ready and problem is None:
            if worker.dead:
                problem = RewardError(f"a reward worker ended while it started, {worker.cause()}")
            elif time.monotonic() >= worker.deadline(self._timeout):
                problem = WaitTimeout(f"a reward worker was not ready after {self._start_timeout:g} s: {self._spec.fn}")
        if problem is not None:
            self._end()
            raise problem


class _Round:
    """One call of `score`."""

    def __init__(self, pool: RewardPool, samples: Sequence[Sample]) -> None:
        self._pool, self._samples = pool, samples
        self._outcomes: list[Outcome | None] = [None] * len(samples)
        self._left = len(samples)
        self._queue = deque(range(len(samples)))
        # Several chunks for each worker, so that one slow chunk does not hold up the rest.
        self._chunk = min(CHUNK, max(1, -(-len(samples) // (4 * pool._count))))
        self._stillborn = 0

    def run(self) -> list[Outcome]:
        pool = self._pool
        while self._left:
            pool._fill(min(pool._count, max(1, self._left)))
            for worker in pool._workers:
                if worker.ready and not worker.rows and self._queue:
                    self._hand_out(worker)
            active = [worker for worker in pool._workers if worker.rows or not worker.ready]
            pool._wait(active)
            for worker in active:
                self._attend(worker)
        return [outcome for outcome in self._outcomes if outcome is not None]

    def _hand_out(self, worker: "_Worker") -> None:
        rows = [self._queue.popleft() for _ in range(min(self._chunk, len(self._queue)))]
        worker.give(rows, [self._samples[row] for row in rows])

    def _attend(self, worker: "_Worker") -> None:
        if not worker.rows:
            self._pool._greet(worker)
            return
        for notice in worker.notices():
            if isinstance(notice, Done):
                self._collect(worker)
                return
        if worker.dead:
            self._bury(worker, Outcome("error", detail=f"the process that scored it ended, {worker.cause()}"), None)
        elif time.monotonic() >= worker.deadline(self._pool._timeout):
            row = worker.board.row
            if time.monotonic() < worker.deadline(self._pool._timeout):
                return  # it has moved on since
            worker.signal()
            worker.reap()
            detail = f"scoring took longer than {self._pool._timeout:g} s"
            self._bury(worker, Outcome("timeout", detail=detail), row)

    def _bury(self, worker: "_Worker", blame: Outcome, killed_at: int | None) -> None:
        """Take over what a dead worker leaves: its scores, the row it was at, and the rows it did not begin."""
        if self._pool._closed:
            raise RewardError("the reward pool was closed while it scored")
        at, rows = worker.board.row, worker.rows
        begun = at != NO_ROW or any(status != PENDING for status in worker.board.status[: len(rows)])
        guilty = at != NO_ROW and killed_at in (None, at) and worker.board.status[at] == PENDING
        self._collect(worker)
        if guilty:
            self._settle(rows[at], blame)
        self._queue.extendleft(reversed([row for row in rows if self._outcomes[row] is None]))
        worker.end()
        self._pool._workers.remove(worker)
        self._pool.replaced += 1
        self._stillborn = 0 if begun else self._stillborn + 1
        if self._stillborn >= _STILLBORN:
            raise RewardError(f"{_STILLBORN} reward workers in a row ended before they began a row, {worker.cause()}")

    def _collect(self, worker: "_Worker") -> None:
        board = worker.board
        for place, row in enumerate(worker.rows):
            if (status := board.status[place]) == PENDING:
                continue
            failed = worker.failures.get(place)
            if failed is not None:
                self._settle(row, Outcome("error", None, failed.detail, failed.report))
            else:
                detail = "the reward function returned None" if status == UNSCORED else ""
                self._settle(row, Outcome(_NAMES[status], board.value[place] if status == OK else None, detail))
        worker.rows = []

    def _settle(self, row: int, outcome: Outcome) -> None:
        self._outcomes[row] = outcome
        self._left -= 1


_numbers = itertools.count()


@dataclass(slots=True)
class _Worker:
    """The parent's side of one process."""

    spec: RewardSpec
    start_timeout: float
    ready: bool = False
    dead: bool = False
    rows: list[int] = field(default_factory=list)
    """Rows of the round that it has, by their place on the board."""
    failures: dict[int, Failed] = field(default_factory=dict)
    board: Board = field(init=False)
    pipe: "connection.Connection[Sequence[Row], Notice]" = field(init=False)
    _process: Any = field(init=False)
    _started: float = field(init=False)

    def __post_init__(self) -> None:
        self.board = multiprocessing.get_context("spawn").RawValue(Board)
        self.pipe, theirs = pipe()
        name = f"asyncflow-reward-{next(_numbers)}"
        self._started = time.monotonic()
        with theirs:
            self._process = spawn(serve, (self.spec, theirs, self.board), name)

    @property
    def pid(self) -> int:
        return int(self._process.pid)

    @property
    def sentinel(self) -> int:
        return int(self._process.sentinel)

    def deadline(self, timeout: float) -> float:
        """Monotonic time at which patience with it ends."""
        if not self.ready:
            return self._started + self.start_timeout
        limit = timeout if self.board.row != NO_ROW else max(timeout, _IDLE_LIMIT)
        return self.board.since + limit

    def look(self, timeout: float) -> float:
        """Monotonic time at which its board must be looked at, if nothing is heard of it before."""
        if self.ready and self.board.row == NO_ROW:  # a row may begin, and hang, at once
            return time.monotonic() + timeout
        return self.deadline(timeout)

    def give(self, rows: list[int], samples: Sequence[Sample]) -> None:
        self.rows, self.failures = rows, {}
        self.board.reset()
        try:
            self.pipe.send([(s.response, s.prompt, s.answer, s.item, s.source) for s in samples])
        except (BrokenPipeError, ConnectionResetError):
            self.dead = True

    @property
    def gone(self) -> bool:
        """Whether the process has ended."""
        return bool(connection.wait([self.sentinel], 0.0))

    def notices(self) -> list[Notice]:
        """Take what has arrived; the end of the process is noted."""
        found: list[Notice] = []
        ended = self.gone
        try:
            while self.pipe.poll():
                found.append(self.pipe.recv())
        except (EOFError, OSError):
            ended = True
        self.dead |= ended
        for notice in found:
            self.ready |= isinstance(notice, Ready)
            if isinstance(notice, Failed):
                self.failures[notice.row] = notice
        return found

    def dismiss(self) -> None:
        """Let an idle process end by itself."""
        self.pipe.close()

    def signal(self) -> None:
        """Kill the process and all that it started."""
        try:
            os.killpg(self.pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):  # not yet the head of a group: it is still starting
            self._process.kill()

    def reap(self) -> None:
        """Wait for the end of a killed process, and take what it still said."""
        self._process.join()
        self.notices()

    def end(self) -> None:
        """Leave no process. It is signalled before it is reaped, while its id cannot be another's."""
        self.signal()
        self._process.join()
        self.pipe.close()

    def cause(self) -> str:
        """Say how the process ended."""
        self._process.join(1.0)
        code = self._process.exitcode
        if code is None:
            return "and did not say how"
        return f"killed by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
