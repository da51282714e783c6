"""The story of a run: publish, evaluate, warm up, train, evaluate, save.

The conductor admits prompts as the staleness controller allows and waits on the board for what the stages report.
It never touches a response: everything else follows from what the stages read and write.
"""

import logging
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from asyncflow import checkpoint, finished
from asyncflow.admission import Admission
from asyncflow.board import TRAINER, Board, Stopped
from asyncflow.config.model import Pipeline
from asyncflow.data.demonstrations import Demonstrations
from asyncflow.data.draws import Draws
from asyncflow.data.order import Order
from asyncflow.data.prompts import Prompts
from asyncflow.delivery import Delivery
from asyncflow.errors import AsyncflowError, DataError, StorageError
from asyncflow.evaluation import Evaluations
from asyncflow.execute.local import LocalExecutor, assignments
from asyncflow.execute.messages import (
    REQUEUED,
    Applied,
    Dropped,
    Event,
    Failed,
    GaveUp,
    Publish,
    Published,
    Ready,
    Saved,
    Staged,
    Stepped,
    Stop,
    Traced,
    Worked,
)
from asyncflow.execute.replica import Assignment
from asyncflow.execute.restarts import Restarts, restartable
from asyncflow.finished import Returned
from asyncflow.observe.metrics import Metrics
from asyncflow.observe.steps import StepLog
from asyncflow.observe.trace import Trace
from asyncflow.saving import Saving
from asyncflow.seeds import mix
from asyncflow.serve import KEPT
from asyncflow.stages import reference
from asyncflow.stages.plan import Plan
from asyncflow.storage import Batch, Schema, TransferQueue
from asyncflow.storage.client import Table
from asyncflow.storage.status import Counts
from asyncflow.types import Int64s, Version
from asyncflow.watchdog import Watchdog
from asyncflow.weights import clear

log = logging.getLogger(__name__)
AHEAD = 4
"""Supervised steps whose examples are put before they are trained."""
LOST_STEPS = 4
"""A step that loses this many times its groups is given up: its prompts do not yield a single scored response.
With `dynamic_sampling`, which loses groups on purpose, that says how many."""


@dataclass(slots=True)
class Materials:
    """What a run is made of, beside its configuration."""

    prompts: Prompts
    held_out: Prompts | None
    tokenizer: Any


@dataclass(slots=True)
class Conductor:
    """Runs one flow in the calling thread."""

    config: Pipeline
    folder: Path
    plan: Plan
    prepare: Callable[[], Materials]
    """Loads prompts and tokenizer; called while the libraries of the engines are loaded."""
    metrics: Metrics
    resume: Path | None = None
    trace: Trace = field(default_factory=Trace)
    materials: Materials = field(init=False)
    board: Board = field(init=False)
    queue: TransferQueue = field(init=False)
    executor: LocalExecutor = field(init=False)
    train_seconds: float = field(default=0.0, init=False)
    """Time that training took, without the evaluations and checkpoints between its steps."""
    ledger: Counts | None = field(default=None, init=False)
    _tables: dict[str, Table] = field(default_factory=dict, init=False)
    _draws: Draws = field(init=False)
    _lost_before: int = field(default=0, init=False)
    """Groups that were lost before the last step was trained."""
    _returned: Returned | None = field(default=None, init=False)
    """Responses that the checkpoint had."""
    steps_before: int = field(default=0, init=False)
    """Steps of reinforcement learning that the checkpoint has, of which this run goes on."""
    _warmups_before: int = field(default=0, init=False)
    _delivery: Delivery = field(init=False)
    _evaluations: Evaluations = field(init=False)
    _training_since: float = field(default=0.0, init=False)
    _saving: Saving = field(init=False)
    _steps: StepLog = field(init=False)
    restarts: Restarts = field(init=False)
    _begun: bool = field(default=False, init=False)
    """Whether all replicas were ready once."""
    _unsettled: bool = field(default=False, init=False)
    """Whether some rows may have been dropped of which nobody has told."""
    _stayers: frozenset[str] = field(init=False)
    """Replicas that do not begin again."""

    def __post_init__(self) -> None:
        jobs = self._jobs()
        self.board = Board(
            replicas=tuple(job.name for job in jobs),
            engines=tuple(job.name for job in jobs if job.specs[0].host == "rollout"),
            group_size=self.config.train.group_size,
        )
        self._steps = StepLog(self.metrics, supervised=self.config.train.supervised)
        self.restarts = Restarts(self.config.executor.max_restarts)
        self._stayers = frozenset(job.name for job in jobs if not restartable(job.specs))
        self.queue = TransferQueue.open("embedded://")
        self.executor = LocalExecutor(self.queue, self.report, self.fell)
        self._saving = Saving(self.config, self.board, self.plan.tables["train"], self.executor.send, self.folder)
        patience = self.config.weights.timeout / max(1, len(self.board.engines))
        self._delivery = Delivery(self.board.engines, TRAINER, self.executor.send, patience)
        self._evaluations = Evaluations(self.config, self.board, self._delivery, self.metrics, self.trace)

    @property
    def phase(self) -> str:
        """What the run is doing now."""
        return self.trace.phase

    @phase.setter
    def phase(self, phase: str) -> None:
        self.trace.enter(phase)

    @property
    def too_long(self) -> int:
        """Prompts that were left out because they are too long."""
        return self.materials.prompts.dropped

    def run(self) -> bool:
        """Conduct the run to its end; False if it was stopped before. Whatever happens, nothing is left running."""
        if self.config.staleness > 1 and self.config.train.off_policy == "none":
            log.warning(
                "max_staleness %d: the loss has no correction for what is more than a version old",
                self.config.staleness,
            )
        try:
            self.executor.warm()
            self.materials = self.prepare()
            self._start()
            self._await_replicas()
            self._publish()
            self._evaluate("before")
            self._warm_up()
            if self.config.train.supervised:
                self._imitate()
            else:
                self._train()
            self._evaluate("after")
            self._save(self.folder / "checkpoint", final=True)
        except Stopped:
            self._saving.early()
            return False
        except AsyncflowError as error:
            if self._begun:
                self._saving.what_is_left()
            first = self.board.failure
            if isinstance(error, StorageError) and first is not None and first is not error:
                # A trainer that failed takes the queue with it: its own error says more than what follows from it.
                raise first from error
            raise
        finally:
            self._close()
        return True

    def report(self, replica: str, event: Event) -> None:
        """Take an event of a replica; called from the executor's threads, and never raises."""
        try:
            self._take(replica, event)
        except Exception:  # noqa: BLE001  the border of those threads: the error ends the run
            self.board.take(replica, Failed(f"taking {type(event).__name__} of it\n{traceback.format_exc()}"))

    def _take(self, replica: str, event: Event) -> None:
        self.trace.take(replica, event)
        if isinstance(event, Traced):
            return  # nothing depends on it, and nothing has moved
        if isinstance(event, Stepped):
            self._steps.stepped(event, self.board)
        elif isinstance(event, Worked):
            self._steps.worked(event, self.board)
            self.restarts.work(replica)
        self.board.take(replica, event)
        if isinstance(event, Published):
            self._delivery.published(event.version, event.offer)
            if not self.board.stopping:
                self._delivery.use(event.version)
        elif isinstance(event, Staged):
            self._delivery.staged(replica, event.version)
        elif isinstance(event, Applied | GaveUp):
            if isinstance(event, GaveUp):
                log.warning("%s goes on without version %d: %s", replica, event.version, event.reason)
            self._delivery.answered(replica, event.version, applied=isinstance(event, Applied))
        elif isinstance(event, Saved):
            self._saving.saved(event)
        elif isinstance(event, Ready):
            if replica in self.board.engines:
                self._delivery.joined(replica)
            if self._begun:
                self._settle()
        elif isinstance(event, Dropped) and self._unsettled:
            self._settle()

    def fell(self, replica: str, failed: Failed) -> int:
        """Hear how a replica has failed; how often in a row, if it is to begin again, else 0 and the run ends."""
        self._delivery.left(replica)
        before = self.restarts.counts[replica]
        again = self._begun and not failed.final and not self.board.stopping and self.phase != "ending"
        failures = self.restarts.fail(replica) if again else 0
        if failures:
            self.board.fall(replica)
            log.warning("replica %s failed and is started again: %s", replica, failed.report.rstrip())
            return failures
        dog = self.board.watchdog
        often = f"\nit was started again {before} times before" if before else ""
        report = f"{failed.report.rstrip()}{often}{dog.stalled if dog is not None else ''}"
        self.board.take(replica, Failed(report))
        if replica in self._stayers:  # nobody is left to save what is trained, and nothing more will be
            with suppress(StorageError):
                self.queue.fail(f"replica {replica}: {report}")
        return 0

    def _settle(self) -> None:
        """Find rows that were dropped while nobody was left to tell: with their replica, or by the queue itself.

        What is requeued is the trainer's to tell, which lives: until it has, nothing is taken for lost.
        """
        groups = self.board.under_way()
        table = self._tables["train"]
        living = table.find(groups).rows.tolist()
        self._unsettled = table.ledger().dropped.get(REQUEUED, 0) > self.board.requeued
        if not self._unsettled:
            self.board.settle(groups, living)

    # What happens, in order.

    def _start(self) -> None:
        for name, found in self.plan.tables.items():
            rows = 4 * self.config.warmup.rows_per_step if name == "warmup" and self.config.warmup else None
            table = self.queue.create_table(name, Schema(dict(found.columns)), max_rows=rows)
            for stage in found.stages:
                if stage.build:
                    lease = self.config.executor.wait_timeout * (KEPT if stage.gathers else 1)
                    reads = [column for column in stage.reads if column != "row"]  # the stage loop adds it
                    table.task(stage.name, reads, lease_seconds=lease, durable=stage.durable, **stage.sampling)
            self._tables[name] = table
        self._saving.table = self._tables["train"]
        held_out = self.materials.held_out
        if held_out is not None:
            numbers = np.arange(len(held_out))
            self._evaluations.table = self._tables["eval"]
            self._evaluations.prompts = self._prompt_batch(held_out.batch, self.config.eval.temperature, numbers)
        self._go_on()
        executor = self.config.executor
        stall = min(executor.stall_timeout, executor.wait_timeout / 2)
        self.board.watchdog = Watchdog(stall, self.plan.tables, self._tables)
        self.executor.start(self._jobs())

    def _go_on(self) -> None:
        """Stand where the checkpoint was taken, with the responses that it has."""
        config = self.config
        self._draws = Draws(Order(len(self.materials.prompts), config.seed, config.data.shuffle))
        self._saving.draws = self._draws
        if self.resume is None:
            return
        record = checkpoint.progress(self.resume)
        self.steps_before, self._warmups_before = int(record["step"]), int(record["warmups"])
        self._steps.before = {"train": self.steps_before, "warmup": self._warmups_before}
        self._draws.restore(record)
        rows = finished.read(self.resume / checkpoint.FINISHED)
        if rows is None:
            return
        # What was trained between the writing of the file and the checkpoint is not outstanding.
        left = np.isin(rows["group_id"].array, [draw.group for draw in self._draws.outstanding])
        if left.any():
            rows = rows.take(np.flatnonzero(left))
            self._returned = Returned.to(self._tables["train"], self.plan.tables["train"], rows)
            self._draws.keep(self._returned.groups.tolist())

    def _await_replicas(self) -> None:
        config, board = self.config, self.board
        board.wait(
            lambda: board.ready >= set(board.replicas),
            config.executor.start_timeout,
            lambda: f"replicas to be ready: {', '.join(sorted(set(board.replicas) - board.ready))}",
        )
        self._begun = True

    def _publish(self) -> None:
        before = self.board.published
        self.executor.send(TRAINER, Publish())
        self._wait(lambda: self.board.published > before, self.config.weights.timeout, "the trainer to publish weights")
        self._wait_applied(self.board.published)

    def _evaluate(self, moment: str, step: int | None = None) -> None:
        if self.materials.held_out is None or any(record["moment"] == moment for record in self.metrics.of("eval")):
            return
        if step is not None and self.config.flows:
            self._evaluations.begin(moment, step)
            return
        self.phase = f"evaluating {moment}"
        self._evaluations.between(moment, step)

    def _warm_up(self) -> None:
        warmup = self.config.warmup
        if warmup is None:
            return
        self.phase = "warming up"
        table = self._tables["warmup"]
        examples = self._examples(warmup.answers, self._warmups_before * warmup.rows_per_step)
        left = warmup.steps - self._warmups_before
        for _ in range(left):
            self.board.check()
            table.put(examples.take(warmup.rows_per_step), timeout=self.config.executor.wait_timeout)
        self._wait(
            lambda: self.board.steps["warmup"] >= left, self.config.executor.wait_timeout, f"{left} warm-up steps"
        )
        table.seal()
        if left:
            self._publish()
        self._evaluate("after_warmup")

    def _imitate(self) -> None:
        """Train on given answers: some steps are put ahead, but none before what is due after the one before it."""
        self.phase = "training"
        config, board, table = self.config, self.board, self._tables["train"]
        examples = self._examples(config.train.answers, self.steps_before * config.rows_per_step)
        first, steps, done, put = board.published, config.train.steps - self.steps_before, 0, 0
        self._training_since = time.monotonic()
        self._between_steps(first, done)
        while done < steps:
            while put < min(steps, done + AHEAD) and (put == done or not self._due(put)):
                table.put(examples.take(config.rows_per_step))
                put += 1
            waited = f"step {done + 1 + self.steps_before} to be trained"
            self._wait(partial(lambda done: board.logged > done, done), config.executor.wait_timeout, waited)
            while done < board.logged:
                done += 1
                self._between_steps(first, done)
        if self.materials.held_out is not None:
            self._wait_published(first + done)
        self._saving.drain()

    def _due(self, done: int) -> bool:
        """Whether an evaluation or a checkpoint comes after so many steps."""
        every = (self.config.eval.every, self.config.output.checkpoint_every)
        return any(count and (done + self.steps_before) % count == 0 for count in every)

    def _train(self) -> None:
        self.phase = "training"
        config, board = self.config, self.board
        first = board.published
        needed = config.train.kl_coef > 0 or (config.critic is not None and config.critic.path is None)
        if needed and config.warmup and not (self.folder / reference.FOLDER).exists():
            self._save(self.folder / reference.FOLDER)
        self._training_since = time.monotonic()
        steps, done = config.train.steps - self.steps_before, 0
        admission = Admission.of(config, board, self._draws, steps, self._waiting)
        self._begin_returned(admission)
        self._between_steps(first, done)
        while done < steps:
            self._fill(admission)
            self._wait(
                partial(self._has_news, admission, done, self._evaluations.moves),
                config.executor.wait_timeout,
                f"step {done + 1 + self.steps_before} to be trained",
            )
            admission.hear(done)
            self._guard(done)
            while done < board.logged:
                done, self._lost_before = done + 1, board.lost
                if config.staleness == 0:
                    self._evaluations.free()
                    self._wait_applied(first + done)
                self._between_steps(first, done)
            admission.hear(done)
        self._wait_published(first + done)
        self._evaluations.drain()
        self._saving.drain()

    def _has_news(self, admission: Admission, done: int, moves: int) -> bool:
        """Whether there is anything to do; an evaluation that has moved gives whoever waits for it new patience."""
        return admission.has_news(done) or self._evaluations.moves > moves

    def _waiting(self) -> int:
        """Rows that are finished and not trained; the queue knows, whatever was dropped meanwhile."""
        rows = self._tables["train"].status().tasks["train"]
        return rows.waiting + rows.leased

    def _begin_returned(self, admission: Admission) -> None:
        """Admit what the checkpoint had of finished responses."""
        if self._returned is None:
            return
        rows: dict[int, tuple[int, ...]] = {}
        for row, group in zip(self._returned.ids.tolist(), self._returned.groups.tolist(), strict=True):
            rows[group] = (*rows.get(group, ()), row)
        admission.control.admit(len(rows))
        self.board.admit(rows)
        with self.board.changed:
            self.board.served["advantage"] += len(self._returned.ids)
        self._returned.begin()

    def _fill(self, admission: Admission) -> None:
        """Admit as many prompts as there is room for."""
        drawn = admission.take()
        if not drawn:
            return
        numbers = np.array([draw.group for draw in drawn], np.int64)
        chosen = self.materials.prompts.batch.take([draw.prompt for draw in drawn])
        batch = self._prompt_batch(chosen, self.config.rollout.temperature, numbers)
        requeued = np.array([draw.requeued for draw in drawn], np.int32)
        batch = batch.with_columns({"group_id": numbers, "requeued": requeued})
        size = self.config.train.group_size
        rows = self._tables["train"].put(batch, repeat=size).reshape(-1, size).tolist()
        self.board.admit({group: tuple(own) for group, own in zip(numbers.tolist(), rows, strict=True)})

    def _between_steps(self, first: Version, done: int) -> None:
        """Do what is due after so many steps; in phases, no row is in flight."""
        self.train_seconds += time.monotonic() - self._training_since
        step, output = done + self.steps_before, self.config.output
        if 0 < step < self.config.train.steps:
            every = self.config.eval.every
            # A run that goes on makes up for an evaluation that was due and was not finished.
            if every and step >= every and (step % every == 0 or not done):
                self._wait_published(first + done)
                self._evaluate(f"step_{step // every * every}", step)
            if output.checkpoint_every and step % output.checkpoint_every == 0 and done:
                self._saving.drain()
                self._save(self.folder / "checkpoints" / f"step-{step:06d}", background=True)
        if not output.checkpoint_every:
            self._tables["train"].commit("train", first + done)
        self.phase = "training"
        self._training_since = time.monotonic()

    def _guard(self, done: int) -> None:
        step = done + 1
        lost = self.board.lost - self._lost_before
        tries = self.config.train.dynamic_sampling or LOST_STEPS
        if lost >= tries * self.config.prompts_per_step * (1 + self.config.staleness):
            dropped = self._tables["train"].ledger().dropped
            raise DataError(
                f"step {step + self.steps_before} cannot be filled: {lost} prompts have lost all of their responses "
                f"(rows dropped: {', '.join(f'{reason}: {rows}' for reason, rows in dropped.items())})"
                f"{self._trouble()}"
            )

    def _trouble(self) -> str:
        detail = self.board.trouble.detail
        return f"; of the last response without a score: {detail}" if detail else ""

    def _close(self) -> None:
        self.phase = "ending"
        self._evaluations.close()
        self._delivery.close()
        try:
            for name in self.board.replicas:
                self.executor.send(name, Stop())
            if "train" in self._tables:
                self.ledger = self._tables["train"].ledger()
        finally:
            self.queue.close()
            self.executor.stop(self.config.executor.stop_timeout)
            clear(self.folder)

    # Smaller pieces.

    def _save(self, folder: Path, *, background: bool = False, final: bool = False) -> None:
        self.phase = "saving"
        self._saving.save(folder, background=background, final=final)

    def _wait(self, until: Callable[[], bool], timeout: float, what: str) -> None:
        self.board.wait(until, timeout, lambda: what)

    def _wait_published(self, version: Version) -> None:
        self._wait(
            lambda: self.board.published >= version, self.config.weights.timeout, f"version {version} to be published"
        )

    def _wait_applied(self, version: Version) -> None:
        self.board.wait_applied(version, self.config.weights.timeout)

    def _examples(self, answers: list[str] | None, drawn: int) -> Demonstrations:
        """Return supervised examples, after so many that were drawn before."""
        data, config = self.materials, self.config
        found = Demonstrations(data.prompts.batch, answers, data.tokenizer, config.seed, config.data.shuffle)
        found.take(drawn)
        return found

    def _prompt_batch(self, prompts: Batch, temperature: float, numbers: Int64s) -> Batch:
        return prompts.with_columns(
            {
                "temperature": np.full(len(prompts), temperature, dtype=np.float32),
                "seed": mix(self.config.seed, numbers),
                "requeued": np.zeros(len(prompts), np.int32),
            }
        )

    def _jobs(self) -> list[Assignment]:
        return assignments(self.plan.stages, self.config, self.folder, self.resume)
