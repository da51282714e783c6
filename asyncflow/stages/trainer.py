"""The training engine that the stages of a process share: what goes into its gradient, and what comes of it."""

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import msgspec

from asyncflow import checkpoint
from asyncflow.algorithms.loss import PolicyLoss, SftLoss
from asyncflow.algorithms.report import Report, combine, divided, metrics
from asyncflow.backends import train_engine
from asyncflow.backends.base import OptimSpec, Ranks, TrainEngine
from asyncflow.data.tokenizer import tokenizer
from asyncflow.execute.messages import Failed, Published
from asyncflow.stage import Context
from asyncflow.stages.model import model_spec, train_options
from asyncflow.storage import Batch
from asyncflow.types import Version
from asyncflow.weights import sender
from asyncflow.weights.publisher import Publisher

Word = TypeVar("Word", bound=msgspec.Struct)


@dataclass(slots=True)
class Trainer:
    """The engine of `Train` and `Warmup`, one at a time; of several ranks, each process has its own."""

    engine: TrainEngine
    publisher: Publisher | None
    """Of the rank that speaks for all."""
    warmups: int = 0
    """Supervised steps so far, those before a checkpoint included."""
    lock: threading.Lock = field(default_factory=threading.Lock)
    _reports: list[Report] = field(default_factory=list)

    @classmethod
    def of(cls, context: Context) -> "Trainer":
        """Make the engine, or return the one that this process has."""
        return context.resources.share(
            "trainer", lambda: cls(_engine(context), _publisher(context), done(context, "warmups"))
        )

    @property
    def leads(self) -> bool:
        """Whether this rank speaks for all."""
        return self.publisher is not None

    def exchange(self, word: Word) -> list[Word]:
        """Return what every rank says, in their order."""
        if self.engine.data_parallel[1] == 1:
            return [word]
        said = self.engine.exchange(msgspec.msgpack.encode(word))
        return [msgspec.msgpack.decode(each, type=type(word)) for each in said]

    def add(self, batch: Batch, columns: Sequence[str], loss: PolicyLoss | SftLoss, context: Context) -> bool:
        """Add the gradient of rows to that of the step, undivided; False if the run was stopped half-way."""
        budget = context.config.train.token_budget
        for micro_batch in self.engine.micro_batches(batch, budget, columns, batch["row"].array):
            if context.stopping.is_set():
                return False
            self._reports.append(self.engine.forward_backward(micro_batch, loss, entropy=loss.entropy))
        return True

    @property
    def report(self) -> Report:
        """What the losses of the step have reported so far, on this rank."""
        return combine(self._reports)

    def step(self, lr: float, reports: Sequence[Report], share: float = 1.0) -> dict[str, float]:
        """Multiply what was added on all ranks by `share`, make the optimizer step, and return its metrics."""
        made = self.engine.optim_step(lr, share)
        self._reports.clear()
        return {**metrics(divided(combine(reports), share)), "grad_norm": made.grad_norm, "lr": made.lr}

    def publish(self) -> None:
        """Copy the weights at hand, to be published in the background."""
        tensors = self.engine.export_weights()
        if self.publisher is not None:
            self.publisher.publish(self.engine.version, tensors)
            return
        for _ in tensors:
            pass  # whoever holds a share of them takes part

    def retire(self, version: Version) -> None:
        """Let go of weights that are older than a version: nobody needs them any more."""
        if self.publisher is not None:
            self.publisher.retire(version)

    def close(self) -> None:
        """Let what is under way be published, and free everything; idempotent."""
        if self.publisher is not None:
            self.publisher.close()
        self.engine.close()


def done(context: Context, what: str) -> int:
    """Return how many steps of a kind the checkpoint has that the run goes on from."""
    return 0 if context.resume is None else int(checkpoint.progress(context.resume)[what])


def _publisher(context: Context) -> Publisher | None:
    if context.rank:
        return None
    return Publisher(
        sender(context.config, context.folder),
        lambda version, offer: context.emit(Published(version, offer)),
        lambda report: context.emit(Failed(report)),
        context.config.weights.timeout,
        context.emit,
    )


def _engine(context: Context) -> TrainEngine:
    config, train = context.config, context.config.train
    engine = train_engine(train.backend)(
        model_spec(config, tokenizer(config.model), context.resume),
        optim=OptimSpec(train.betas, train.eps, train.weight_decay, train.max_grad_norm),
        temperature=config.rollout.temperature,
        options=train_options(config),
        ranks=Ranks(context.rank, train.data_parallel, context.rendezvous, config.executor.wait_timeout),
    )
    if context.resume is not None:
        checkpoint.load_engine(context.resume, engine)
    return engine
