"""Train: groups in, one optimizer step out for each `prompts_per_step` of them.

Rows go into the gradient as they come, as soon as they fill a micro-batch; when the step is full its gradient is
divided by the denominators of all of its rows, so that neither the token budget, nor the order of the rows, nor the
number of ranks changes it. Where the loss must know all rows first (`whole`), they wait for each other. Every
row's staleness is judged here, where it is consumed, by the version that the step begins with. New weights are
published as soon as they exist.

In phases a batch is a whole step. Otherwise it is a group or a few; what is too old leaves as `on_stale` says, and
others come for it.
"""

import itertools
import os
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import numpy.typing as npt

from asyncflow import checkpoint
from asyncflow.algorithms.aggregate import UNDIVIDED, Denominators
from asyncflow.algorithms.loss import PolicyLoss, policy_loss
from asyncflow.algorithms.options import is_path, reads, whole
from asyncflow.algorithms.schedule import learning_rate
from asyncflow.config.importing import resolve
from asyncflow.data.tokenizer import tokenizer
from asyncflow.errors import WeightsError
from asyncflow.execute.messages import (
    REQUEUED,
    Command,
    Copied,
    Failed,
    Finished,
    Publish,
    Retire,
    Save,
    Saved,
    Stepped,
    Stop,
    Traced,
)
from asyncflow.stage import Context, Done, Drop, Rows
from asyncflow.stages.step import Arrived, Share, Trained, describe
from asyncflow.stages.trainer import Trainer, done
from asyncflow.stages.valuer import Valuer
from asyncflow.stages.whole import whitened, with_denominators
from asyncflow.staleness import check, gate, waited
from asyncflow.storage import Batch
from asyncflow.storage.batch import Column
from asyncflow.types import Version

_RECENT = 64
"""Steps whose groups are remembered: more than the flow can be behind, which hears of every one before the next."""
STALE = "stale"
"""Why rows leave that are too old, for good."""
LOGPROB_GAP = {"float32": 1e-2, "bfloat16": 2e-1}
"""Largest mean |log-probability of the trainer − of the rollout engine| on equal weights, by dtype: beyond it the
two do not hold the same model, whatever the transfer said."""


class Train:
    """Policy gradient: reads responses with their advantages; writes when they were trained."""

    def setup(self, context: Context) -> None:
        self._context, self.trainer = context, Trainer.of(context)
        self._valuer = Valuer.of(context) if context.config.critic is not None else None
        self._step, self._compared = done(context, "step"), False
        self._share = Share()
        self._writing = ThreadPoolExecutor(1, "asyncflow-save")
        self._trained: deque[tuple[int, ...]] = deque(maxlen=max(_RECENT, context.config.staleness + 2))
        options = context.config.train.algorithm_options
        self._reads, self._whole = reads(options), whole(options)
        own = resolve(context.config.train.loss) if is_path(options["loss"]) else None
        self._loss = policy_loss(options, UNDIVIDED, context.config.rollout.max_response_tokens, own)

    def process(self, batch: Batch) -> Iterator[Rows | Drop | Done]:
        config, share = self._context.config, self._share
        with self.trainer.lock:
            drops, tokens = self._judge(batch)
            yield from drops
            if len(share.groups) >= config.prompts_per_step:
                yield from self._finish()
            elif tokens >= config.train.token_budget and not self._whole:
                self._add(self._share.release(), self._loss)

    def _judge(self, batch: Batch) -> tuple[list[Drop], int]:
        """Take the rows that may be trained by the version at hand.

        Returns what leaves, and the most tokens that a rank now holds back.
        """
        config, version = self._context.config, self.trainer.engine.version
        # Outside of `async` a row that is too old is a fault of the engine, which the check reports.
        policy = config.on_stale if config.mode == "async" else "wait"
        verdict = gate(batch["versions"], batch["response_mask"], version, config.staleness, policy)
        groups = batch["group_id"].array
        gone = np.zeros(len(batch), np.bool_)
        if policy == "drop":
            gone[verdict.stale] = True
        self._share.note_stale(batch["response_tokens"].lengths[verdict.stale], verdict.tokens)
        sizes = sum(batch[name].lengths for name in ("prompt_tokens", "response_tokens"))
        held = self._share.tokens + int(np.sum(sizes))
        kept, stale = np.unique(groups[~gone]).tolist(), np.unique(groups[verdict.stale]).tolist()
        said = self.trainer.exchange(Arrived(kept, stale, held))
        found = set(itertools.chain(*(each.kept for each in said)))
        if policy == "requeue":
            again = list(itertools.chain(*(each.stale for each in said)))
            gone = np.isin(groups, again)
            found -= set(again)
        self._share.groups |= found
        left = np.flatnonzero(~gone)
        check(batch["row"].array[left], verdict.ages[left], config.staleness)
        rows = batch if not verdict.stale.size else batch.with_columns({"response_mask": verdict.mask})
        rows = self._made(rows.take(left) if gone.any() else rows, version)
        ages = waited(rows["versions"], rows["response_mask"], version)
        self._share.take(rows, verdict.ages[left], ages)
        return self._drops(batch, gone, requeue=policy == "requeue"), max(each.tokens for each in said)

    def _made(self, rows: Batch, version: Version) -> Batch:
        """Add what the loss reads and no stage has written."""
        columns = {}
        if "ages" in self._reads:
            stamps = rows["versions"]
            assert stamps.offsets is not None
            columns["ages"] = Column.ragged(version - stamps.values, stamps.offsets, stamps.dtype)
        if "truncated" in self._reads:
            ended = np.array(rows["finish"].strings())
            columns["truncated"] = Column.of("float32", (ended == "length").astype(np.float32))
        return rows.with_columns(columns) if columns else rows

    def _drops(self, batch: Batch, gone: npt.NDArray[np.bool_], *, requeue: bool) -> list[Drop]:
        """Say of what leaves, why: a group that was not begun anew too often yet, is."""
        again = np.zeros(len(batch), np.bool_)
        if requeue:
            again = gone & (batch["requeued"].array < self._context.config.max_requeues)
        parts = ((again, REQUEUED), (gone & ~again, STALE))
        return [Drop(np.flatnonzero(rows), reason) for rows, reason in parts if rows.any()]

    def _add(self, rows: Batch | None, loss: PolicyLoss) -> bool:
        """Bring what was held back into the gradient, and into the critic's; False if the run was stopped half-way."""
        if rows is None:
            return True
        if self._valuer is not None and not self._valuer.add(rows, self._context):
            return False
        return self.trainer.add(rows, self._reads, loss, self._context)

    def _finish(self) -> Iterator[Rows | Done]:
        """Make the step, publish it and say so."""
        config, trainer, share = self._context.config, self.trainer, self._share
        self._turn(begins=True)
        rows, loss = share.release(), self._loss
        if rows is not None and self._whole:
            rows = whitened(rows, trainer) if config.train.whiten else rows
            loss = with_denominators(rows, loss, trainer)
        if not self._add(rows, loss):
            return
        said = trainer.exchange(share.said(trainer.report))
        made = self._optimize(said)
        self._share = Share()
        self._turn(begins=False)
        trainer.publish()
        version = trainer.engine.version
        if not config.phased:
            ids, ages = np.concatenate(share.rows), np.concatenate(share.ages).astype(np.int32)
            made_by, mask = np.full(len(ids), version, np.int64), Column.concat(share.masks)
            yield Rows(ids, {"trained_by": made_by, "staleness": ages, "trained_mask": mask})
        groups = tuple(sorted(share.groups))
        self._trained.append(groups)
        yield Done(version)
        if trainer.leads:
            metrics = {**made, **describe(said, stale=config.mode == "async")}
            self._context.emit(Stepped("train", version, metrics, groups, sum(len(each.rewards) for each in said)))

    def _turn(self, *, begins: bool) -> None:
        """Bring the engines to the device, or away from it, where it is shared with others."""
        if self._context.config.mode != "colocated":
            return
        for engine in (self.trainer.engine, *([] if self._valuer is None else [self._valuer.engine])):
            (engine.wake if begins else engine.sleep)()

    def _lr(self) -> float:
        train, critic = self._context.config.train, self._context.config.critic
        if critic is not None and self._step < critic.warmup:
            return 0.0
        return learning_rate(
            self._step, peak=train.lr, schedule=train.schedule, steps=train.steps, warmup=train.lr_warmup
        )

    def _optimize(self, said: list[Trained]) -> dict[str, float]:
        config = self._context.config
        counted = sum((each.denominators for each in said), Denominators(0, 0))
        share = 1.0 if self._whole else counted.share(self._loss.aggregate)
        valued = {} if self._valuer is None else self._valuer.step(counted)
        made = {**valued, **self.trainer.step(self._lr(), [each.report for each in said], share)}
        if not self._compared and made["logprob_gap_mean"] > LOGPROB_GAP[config.model.dtype]:
            raise WeightsError(
                f"on the same weights (version {self.trainer.engine.version - 1}) the log-probabilities of trainer "
                f"and rollout engine differ by {made['logprob_gap_mean']:.3g} on average: they are not the same model"
            )
        self._step, self._compared = self._step + 1, True
        return made

    def command(self, command: Command) -> None:
        """Publish the weights, write a checkpoint, or leave the ranks."""
        if isinstance(command, Retire):
            self.trainer.retire(command.version)
        if isinstance(command, Stop) and not self.trainer.leads:
            # The others may wait for this rank in a call that nothing but its end interrupts; it keeps nothing.
            self._context.emit(Finished())
            os._exit(0)
        if not isinstance(command, Publish | Save):
            return
        if isinstance(command, Save) and command.final:
            self._context.stopping.set()
        with self.trainer.lock:
            if isinstance(command, Publish):
                self.trainer.publish()
                return
            started = time.monotonic()
            folder = Path(command.folder)
            names = tokenizer(self._context.config.model)
            # The flow may not have heard yet of what was trained last.
            trained = set(itertools.chain(*self._trained))
            left = [(group, prompt, tries) for group, prompt, tries in command.outstanding if group not in trained]
            counts = {"step": self._step, "warmups": self.trainer.warmups}
            progress = {**command.progress, "outstanding": left, **counts}
            critic = None if self._valuer is None else self._valuer.made
            write = checkpoint.snapshot(self.trainer.engine, names, progress, critic, command.finished)
            version = self.trainer.engine.version
        self._trace("copy checkpoint", started, version)
        self._context.emit(Copied(command.folder))
        self._writing.submit(self._write, write, folder, version)

    def _write(self, write: Callable[[Path], None], folder: Path, version: Version) -> None:
        started = time.monotonic()
        try:
            write(folder)
            self._trace("write checkpoint", started, version)
            self._context.emit(Saved(str(folder), version))
        except Exception:  # noqa: BLE001  the border of this thread: the flow hears of it
            self._context.emit(Failed(f"saving {folder}\n{traceback.format_exc()}"))

    def _trace(self, what: str, started: float, version: Version) -> None:
        seconds = time.monotonic() - started
        self._context.emit(Traced("checkpoints", what, started, seconds, {"version": version}))

    def close(self) -> None:
        self._writing.shutdown()
        self.trainer.close()
        if self._valuer is not None:
            self._valuer.close()
