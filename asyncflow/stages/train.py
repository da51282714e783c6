"""Train: a step's groups in, one optimizer step out; and the supervised warm-up on the same engine.

A step is one optimizer update on one global batch. Its denominators are fixed before the first micro-batch, so
neither the token budget nor the order of the rows changes the gradient. Every row's staleness is judged here, where
it is consumed, and new weights are published as soon as they exist.

In phases a batch is a whole step. Otherwise groups come one by one and are kept until a step is full; what is too
old leaves as `on_stale` says, and others come for it.
"""

import itertools
import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from asyncflow import checkpoint
from asyncflow.algorithms.aggregate import Denominators, denominators
from asyncflow.algorithms.loss import PolicyLoss, SftLoss, policy_loss
from asyncflow.algorithms.options import ALGORITHMS, reads
from asyncflow.algorithms.report import combine, metrics
from asyncflow.algorithms.schedule import learning_rate
from asyncflow.backends import train_engine
from asyncflow.backends.base import OptimSpec, TrainEngine
from asyncflow.data.tokenizer import tokenizer
from asyncflow.errors import WeightsError
from asyncflow.execute.messages import REQUEUED, Command, Failed, Publish, Published, Retire, Save, Saved, Stepped
from asyncflow.stage import Context, Done, Drop, Rows
from asyncflow.stages.model import model_spec
from asyncflow.staleness import check, gate, staleness
from asyncflow.storage import Batch
from asyncflow.types import Int64s
from asyncflow.weights import sender
from asyncflow.weights.publisher import Publisher

_RECENT = 64
"""Steps whose groups are remembered: more than the flow can be behind, which hears of every one before the next."""
STALE = "stale"
"""Why rows leave that are too old, for good."""
LOGPROB_GAP = {"float32": 1e-2, "bfloat16": 2e-1}
"""Largest mean |log-probability of the trainer − of the rollout engine| on equal weights, by dtype: beyond it the
two do not hold the same model, whatever the transfer said."""


@dataclass(slots=True)
class Trainer:
    """The engine that `Train` and `Warmup` share, one at a time."""

    engine: TrainEngine
    publisher: Publisher
    warmups: int = 0
    """Supervised steps so far, those before a checkpoint included."""
    lock: threading.Lock = field(default_factory=threading.Lock)

    @classmethod
    def of(cls, context: Context) -> "Trainer":
        """Make the engine, or return the one that this process has."""
        return context.resources.share(
            "trainer", lambda: cls(_engine(context), _publisher(context), _done(context, "warmups"))
        )

    def publish(self) -> None:
        """Copy the weights at hand, to be published in the background."""
        self.publisher.publish(self.engine.version, self.engine.export_weights())

    def close(self) -> None:
        """Let what is under way be published, and free everything; idempotent."""
        self.publisher.close()
        self.engine.close()

    def step(
        self, batch: Batch, columns: Sequence[str], loss: PolicyLoss | SftLoss, lr: float, context: Context
    ) -> dict[str, float] | None:
        """Make one optimizer step on all rows of a batch and return its metrics; None if it was stopped half-way."""
        reports, budget = [], context.config.train.token_budget
        for micro_batch in self.engine.micro_batches(batch, budget, columns, batch["row"].array):
            if context.stopping.is_set():
                return None
            reports.append(self.engine.forward_backward(micro_batch, loss, entropy=loss.entropy))
        made = self.engine.optim_step(lr)
        return {**metrics(combine(reports)), "grad_norm": made.grad_norm, "lr": made.lr}


class Warmup:
    """Supervised: reads prompt and response tokens of a given answer; the loss is their negative log-likelihood."""

    def setup(self, context: Context) -> None:
        self._context, self._trainer = context, Trainer.of(context)

    def process(self, batch: Batch) -> Iterator[Done]:
        train, warmup = self._context.config.train, self._context.config.warmup
        assert warmup is not None
        lr = learning_rate(
            self._trainer.warmups, peak=warmup.lr, schedule=train.schedule, steps=warmup.steps, warmup=train.lr_warmup
        )
        with self._trainer.lock:
            made = self._trainer.step(batch, (), SftLoss(_denominators(batch)), lr, self._context)
            if made is None:
                return
            self._trainer.warmups += 1
            version = self._trainer.engine.version
            yield Done(version)
            self._context.emit(Stepped("warmup", version, made))

    def close(self) -> None:
        self._trainer.close()


class Train:
    """Policy gradient: reads a step's responses with their advantages; writes when they were trained."""

    def setup(self, context: Context) -> None:
        self._context, self._trainer = context, Trainer.of(context)
        self._step, self._compared = _done(context, "step"), False
        self._held: list[Batch] = []
        self._stale: list[tuple[int, Int64s]] = []
        self._trained: deque[tuple[int, ...]] = deque(maxlen=max(_RECENT, context.config.staleness + 2))
        train = context.config.train
        self._options = {name: getattr(train, name) for name in ALGORITHMS[train.algorithm].uses}

    def process(self, batch: Batch) -> Iterator[Rows | Drop | Done]:
        config = self._context.config
        with self._trainer.lock:
            kept, gone, reason = self._judge(batch)
            if gone.size:
                yield Drop(gone, reason)
            if len(kept):
                self._held.append(kept)
            if not config.phased and len(self._held) < config.prompts_per_step:
                return
            whole = Batch.concat(self._held)
            self._held.clear()
            yield from self._step_on(whole)

    def _judge(self, batch: Batch) -> tuple[Batch, Int64s, str]:
        """Return rows as they may be trained by the version at hand, and the positions that leave, with a reason."""
        config, version = self._context.config, self._trainer.engine.version
        # Outside of `async` a row that is too old is a fault of the engine, which the step's own check reports.
        policy = config.on_stale if config.mode == "async" else "wait"
        verdict = gate(batch["versions"], batch["response_mask"], version, config.staleness, policy)
        self._stale.append((verdict.tokens, batch["response_tokens"].lengths[verdict.stale]))
        if policy not in ("drop", "requeue") or not verdict.stale.size:
            return batch.with_columns({"response_mask": verdict.mask}), verdict.stale[:0], ""
        if policy == "requeue":
            again = int(batch["requeued"].array.min()) < config.max_requeues
            return batch.take([]), np.arange(len(batch)), REQUEUED if again else STALE
        return batch.take(np.setdiff1d(np.arange(len(batch)), verdict.stale)), verdict.stale, STALE

    def _step_on(self, batch: Batch) -> Iterator[Rows | Done]:
        """Make a step of a batch, publish it and say so."""
        config, engine = self._context.config, self._trainer.engine
        ages = staleness(batch["versions"], batch["response_mask"], engine.version)
        check(batch["row"].array, ages, config.staleness)
        if config.mode == "colocated":
            engine.wake()
        made = self._update(batch)
        if made is None:
            return
        if config.mode == "colocated":
            engine.sleep()
        self._trainer.publish()
        version = engine.version
        if not config.phased:
            made_by = np.full(len(batch), version, np.int64)
            columns = Batch({"trained_by": made_by, "staleness": ages.astype(np.int32)})
            yield Rows(batch["row"].array, columns)
        groups = tuple(np.unique(batch["group_id"].array).tolist())
        self._trained.append(groups)
        yield Done(version)
        metrics = {**made, **describe(batch, ages), **self._let_go()}
        self._context.emit(Stepped("train", version, metrics, groups, len(batch)))

    def _let_go(self) -> dict[str, float]:
        """Say what was too old since the last step, and how long those responses were: what a policy prefers."""
        lengths = np.concatenate([lengths for _, lengths in self._stale])
        tokens = sum(tokens for tokens, _ in self._stale)
        self._stale.clear()
        if self._context.config.phased:
            return {}
        mean = float(lengths.mean()) if lengths.size else 0.0
        return {"stale_rows": float(lengths.size), "stale_tokens": float(tokens), "stale_response_tokens_mean": mean}

    def command(self, command: Command) -> None:
        """Publish the weights, or write a checkpoint."""
        if isinstance(command, Retire):
            self._trainer.publisher.retire(command.version)
        if not isinstance(command, Publish | Save):
            return
        if isinstance(command, Save) and command.final:
            self._context.stopping.set()
        with self._trainer.lock:
            if isinstance(command, Publish):
                self._trainer.publish()
                return
            folder = Path(command.folder)
            names = tokenizer(self._context.config.model)
            # The flow may not have heard yet of what was trained last.
            trained = set(itertools.chain(*self._trained))
            left = [(group, prompt, tries) for group, prompt, tries in command.outstanding if group not in trained]
            counts = {"step": self._step, "warmups": self._trainer.warmups}
            progress = {**command.progress, "outstanding": left, **counts}
            checkpoint.save(folder, self._trainer.engine, names, progress)
            self._context.emit(Saved(command.folder, self._trainer.engine.version))

    def close(self) -> None:
        self._trainer.close()

    def _update(self, batch: Batch) -> Mapping[str, float] | None:
        config, train = self._context.config, self._context.config.train
        lr = learning_rate(
            self._step, peak=train.lr, schedule=train.schedule, steps=train.steps, warmup=train.lr_warmup
        )
        loss = policy_loss(self._options, _denominators(batch), config.rollout.max_response_tokens)
        made = self._trainer.step(batch, reads(self._options), loss, lr, self._context)
        if made is None:
            return None
        if not self._compared and made["logprob_gap_mean"] > LOGPROB_GAP[config.model.dtype]:
            raise WeightsError(
                f"on the same weights (version {self._trainer.engine.version - 1}) the log-probabilities of trainer "
                f"and rollout engine differ by {made['logprob_gap_mean']:.3g} on average: they are not the same model"
            )
        self._step, self._compared = self._step + 1, True
        return made


def _denominators(batch: Batch) -> Denominators:
    mask = batch["response_mask"]
    return denominators(mask.values, mask.offsets)


def describe(batch: Batch, ages: Int64s) -> dict[str, float]:
    """Summarise the rows of a step: rewards, lengths, ages."""
    rewards, lengths = batch["reward"].array, batch["response_tokens"].lengths
    return {
        "reward_mean": float(rewards.mean()),
        "reward_std": float(rewards.std()),
        "advantage_zero_share": float((batch["advantage"].array == 0).mean()),
        "response_tokens_mean": float(lengths.mean()),
        "response_tokens_max": float(lengths.max(initial=0)),
        "rows": float(len(batch)),
        "tokens": float(lengths.sum() + batch["prompt_tokens"].lengths.sum()),
        "staleness_min": float(ages.min(initial=0)),
        "staleness_mean": float(ages.mean()),
        "staleness_max": float(ages.max(initial=0)),
    }


def _done(context: Context, what: str) -> int:
    return 0 if context.resume is None else int(checkpoint.progress(context.resume)[what])


def _publisher(context: Context) -> Publisher:
    return Publisher(
        sender(context.config, context.folder),
        lambda version, offer: context.emit(Published(version, offer)),
        lambda report: context.emit(Failed(report)),
        context.config.weights.timeout,
    )


def _engine(context: Context) -> TrainEngine:
    config, train = context.config, context.config.train
    engine = train_engine(train.backend)(
        model_spec(config, tokenizer(config.model), context.resume),
        optim=OptimSpec(train.betas, train.eps, train.weight_decay, train.max_grad_norm),
        temperature=config.rollout.temperature,
        options=train.options,
    )
    if context.resume is not None:
        checkpoint.load_engine(context.resume, engine)
    return engine
