"""Evaluation: held-out prompts are answered by one version of the weights, scored and counted.

Between two steps the run waits for it. Beside training it has a thread, and permits of its own: so many held-out
responses are generated at once, and the next prompt is put when there is room. Engines keep the version until the last
of them is there. Meanwhile training goes on as far as the bound on staleness allows, since admission counts by that
version (`admission`); what is published is told when the engines are free again. There is one evaluation at a time.

Rows are known by their ids. What was scored, the replicas say, once or more often; which of the others are still on
their way, the queue knows: so each row counts once, whoever has died meanwhile, and none is waited for in vain.
"""

import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from asyncflow.algorithms.passk import Samples, at_k
from asyncflow.board import Board, Stopped
from asyncflow.config.model import Eval, Pipeline
from asyncflow.delivery import Delivery
from asyncflow.errors import AsyncflowError, WeightsError
from asyncflow.execute.messages import Failed, Scored, Traced
from asyncflow.observe.metrics import Metrics
from asyncflow.observe.trace import FLOW, Trace
from asyncflow.rewards.outcome import UNUSUAL
from asyncflow.storage import Batch
from asyncflow.storage.client import Table
from asyncflow.types import Int64s, Version

_SHARE = 4
"""By default held-out responses have one in so many places of the engines."""


@dataclass(frozen=True, slots=True)
class _Task:
    """One evaluation."""

    moment: str
    step: int | None
    version: Version
    beside: bool
    """Whether training goes on."""
    started: float = field(default_factory=time.monotonic)


@dataclass(slots=True)
class Evaluations:
    """Evaluates, one after another; all but `close` is for one thread."""

    config: Pipeline
    board: Board
    delivery: Delivery
    metrics: Metrics
    trace: Trace
    table: Table = field(init=False)
    prompts: Batch = field(init=False)
    """Held-out prompts, with all columns of the table's source."""
    moves: int = field(default=0, init=False)
    """How often an evaluation has got on; whoever waits for what it holds up has new patience then."""
    _thread: threading.Thread | None = field(default=None, init=False)
    _running: bool = field(default=False, init=False)
    _closed: bool = field(default=False, init=False)

    def between(self, moment: str, step: int | None = None) -> None:
        """Evaluate while nothing else happens, and return when it is recorded."""
        self.drain()
        self._conduct(_Task(moment, step, self._pin(), beside=False))

    def begin(self, moment: str, step: int) -> None:
        """Evaluate beside what goes on; return when engines keep their weights. One that runs is waited for."""
        self.drain()
        task = _Task(moment, step, self._pin(), beside=True)
        self._running = True
        self._thread = threading.Thread(target=self._work, args=(task,), name="asyncflow-evaluation", daemon=True)
        self._thread.start()

    def drain(self) -> None:
        """Wait until no evaluation is under way; raises what has ended it."""
        self._let(lambda: not self._running, "the evaluation to end")

    def free(self) -> None:
        """Wait until engines may use newer weights."""
        self._let(lambda: self.board.pinned is None, "the held-out responses to be generated")

    def close(self) -> None:
        """Give up what is under way; idempotent."""
        with self.board.changed:
            self._closed = True
            self.board.changed.notify_all()
        if self._thread is not None:
            self._thread.join(self.config.executor.stop_timeout)

    def _let(self, until: Callable[[], bool], what: str) -> None:
        longest = self.config.weights.timeout + self.config.executor.wait_timeout
        over = False
        while not over:
            self.board.wait(partial(self._got_on, self.moves, until), longest, lambda: what)
            over = until()

    def _got_on(self, seen: int, until: Callable[[], bool]) -> bool:
        return until() or self.moves > seen

    def _work(self, task: _Task) -> None:
        try:
            self._conduct(task)
        except Stopped:
            return
        except AsyncflowError as error:
            if not self._closed:  # else it follows from the end
                self.board.fail(error)
        except Exception:  # noqa: BLE001  the border of this thread: the error ends the run
            self.board.take("evaluation", Failed(traceback.format_exc()))
        finally:
            with self.board.changed:
                self._running = False
                self._moved()

    def _conduct(self, task: _Task) -> None:
        with self.board.changed:
            self.board.held_out.clear()
        before = self._dropped()
        try:
            self.board.wait_applied(task.version, self.config.weights.timeout)
            rows = self._generate(self._permits() if task.beside else None)
        finally:
            self._release()
        self._wait(lambda: not self._unscored(rows), lambda: f"{len(self._unscored(rows))} held-out scores")
        values = counted(self.config.eval, rows, self.board.held_out, self._dropped() - before, task.version)
        step = {} if task.step is None else {"step": task.step}
        seconds = time.monotonic() - task.started
        record = {"moment": task.moment, "version": task.version, **values, **step}
        self.metrics.log("eval", record, {"seconds": seconds}, beside=task.beside)
        if task.beside:
            facts = {"version": task.version}
            self.trace.take(FLOW, Traced("evaluation", f"evaluating {task.moment}", task.started, seconds, facts))

    def _pin(self) -> Version:
        """Have engines use the newest weights, and keep them."""
        version = self.delivery.hold(self.board.published)
        with self.board.changed:
            self.board.pinned = version
        return version

    def _release(self) -> None:
        self.delivery.release()
        with self.board.changed:
            self.board.pinned = None
            self._moved()

    def _moved(self) -> None:
        self.moves += 1
        self.board.changed.notify_all()

    def _generate(self, permits: int | None) -> Int64s:
        """Have every prompt answered, at most so many responses at once; return the rows, a line for each prompt."""
        rows, begun = [np.empty(0, np.int64)], 0
        while begun < len(self.prompts):
            self._wait(lambda: self._room(permits) > 0, self._missing)
            ends = min(begun + self._room(permits), len(self.prompts))
            rows.append(self.table.put(self.prompts.take(np.arange(begun, ends)), repeat=self.config.eval.samples))
            begun = ends
            with self.board.changed:
                self._moved()
        self._wait(lambda: not self._generating(), self._missing)
        return np.concatenate(rows).reshape(-1, self.config.eval.samples)

    def _room(self, permits: int | None) -> int:
        """Prompts that may begin now: all, without permits."""
        return len(self.prompts) if permits is None else (permits - self._generating()) // self.config.eval.samples

    def _permits(self) -> int:
        section, rollout = self.config.eval, self.config.rollout
        return section.max_inflight or max(section.samples, rollout.replicas * rollout.max_inflight // _SHARE)

    def _wait(self, until: Callable[[], bool], what: Callable[[], str]) -> None:
        self.board.wait(lambda: self._closed or until(), self.config.executor.wait_timeout, what)
        if self._closed:
            raise Stopped("the run ends")

    def _missing(self) -> str:
        return f"{self._generating()} held-out responses"

    def _generating(self) -> int:
        """Rows that live and have no response."""
        return int(np.count_nonzero(~self.table.find().has(["versions"])))

    def _unscored(self, rows: Int64s) -> list[int]:
        """Rows that live and were not scored; what a row says is on the board before the queue lets go of it."""
        living = np.intersect1d(rows, self.table.find().rows).tolist()
        return [row for row in living if row not in self.board.held_out]

    def _dropped(self) -> Counter[str]:
        """Ask the queue, since who dropped rows may have ended before it told."""
        return Counter(self.table.ledger().dropped)


def counted(
    section: Eval, rows: Int64s, found: Mapping[int, Scored], lost: Mapping[str, int], version: Version
) -> dict[str, Any]:
    """Count what was found for rows, a line for each prompt; WeightsError if another version has answered any.

    Accuracy is the share of scored responses whose reward is at least `eval.correct_at`. `lost` is how many rows have
    left for which reason.
    """
    scored = [[found[row] for row in line if row in found] for line in rows.tolist()]
    responses = [response for line in scored for response in line]
    others = {one for response in responses for one in response.versions} - {version}
    if others:
        raise WeightsError(f"held-out prompts were to be answered by version {version}, and {sorted(others)} did, too")
    rewards = np.array([response.reward for response in responses])
    outcomes = Counter(response.outcome for response in responses)
    prompts = [
        Samples(tuple(one.reward >= section.correct_at for one in line), tuple(one.answer for one in line))
        for line in scored
    ]
    return {
        "prompts": len(rows),
        "rows": len(responses),
        "rows_dropped": rows.size - len(responses),
        **{f"reward_{outcome}": outcomes[outcome] + lost.get(f"reward_{outcome}", 0) for outcome in UNUSUAL},
        "accuracy": float((rewards >= section.correct_at).mean()) if len(rewards) else float("nan"),
        "reward_mean": float(rewards.mean()) if len(rewards) else float("nan"),
        **at_k(section.k or [section.samples], prompts),
    }
