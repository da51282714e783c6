"""The critic's engine, which the stages `critic` and `train` of a process share: values out, a step of its own.

Whoever uses it holds the trainer's lock, so that all values of a batch are of one critic. Each rank finds values for
rows of its own, at any time; only the training goes step by step with the other ranks.
"""

from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec
import numpy as np
import torch

from asyncflow import checkpoint
from asyncflow.algorithms.aggregate import UNDIVIDED, Denominators
from asyncflow.algorithms.loss import ValueLoss
from asyncflow.algorithms.report import Report, combine, divided, metrics
from asyncflow.algorithms.whiten import Moments, moments
from asyncflow.backends import train_engine
from asyncflow.backends.base import ModelSpec, OptimSpec, Ranks, TrainEngine
from asyncflow.config.training import Critic
from asyncflow.data.tokenizer import tokenizer
from asyncflow.stage import Context
from asyncflow.stages import reference
from asyncflow.stages.model import model_spec, train_options
from asyncflow.stages.trainer import Trainer
from asyncflow.stages.whole import Measured
from asyncflow.storage import Batch
from asyncflow.storage.batch import Column
from asyncflow.types import Float32s

READS = ("values", "returns")
"""Columns that it is trained on, beside tokens and mask."""


class Valued(msgspec.Struct):
    """What a rank has added to the critic's step."""

    report: Report
    returns: Measured
    """Moments of the returns of its trained tokens."""
    errors: Measured
    """And of what their values lacked."""


@dataclass(slots=True)
class Valuer:
    """The engine is made at once, so that what is wrong with it shows before anything is generated.

    Only where a warm-up has yet to leave the model that training begins with, it is made with the first rows.
    """

    trainer: Trainer
    _context: Context
    _engine: TrainEngine | None = None
    _reports: list[Report] = field(default_factory=list)
    _returns: Moments = field(default_factory=Moments)
    _errors: Moments = field(default_factory=Moments)

    @classmethod
    def of(cls, context: Context) -> "Valuer":
        """Make the one of this process, or return it."""
        trainer, spec = Trainer.of(context), _model(context)
        return context.resources.share(
            "critic", lambda: cls(trainer, context, None if spec is None else _engine(context, spec))
        )

    @property
    def engine(self) -> TrainEngine:
        """The critic."""
        if self._engine is None:
            spec = _model(self._context)
            assert spec is not None
            self._engine = _engine(self._context, spec)
        return self._engine

    @property
    def made(self) -> TrainEngine | None:
        """The critic, if there is one already."""
        return self._engine

    def values(self, batch: Batch, context: Context) -> Column | None:
        """Return the value before each response token of these rows; None if the run was stopped half-way."""
        lengths = batch["response_tokens"].lengths.tolist()
        found: list[Float32s] = [np.empty(0, dtype=np.float32)] * len(batch)
        config, engine = context.config, self.engine
        # Where every bit counts, what lies beside a row must not depend on time, so that nothing does.
        parts = np.arange(len(batch)).reshape(-1, 1 if config.deterministic else max(1, len(batch)))
        if config.mode == "colocated":
            engine.wake()
        for rows in parts:
            for part in engine.micro_batches(batch.take(rows), config.train.token_budget, (), rows, alone=True):
                if context.stopping.is_set():
                    return None
                values = engine.values(part).cpu().numpy()
                for row, own in zip(part.rows.tolist(), values, strict=True):
                    found[row] = own[: lengths[row]].astype(np.float32)
        if config.mode == "colocated":
            engine.sleep()
        return Column.of("list<float32>", found)

    def add(self, batch: Batch, context: Context) -> bool:
        """Add the gradient of rows to that of the step, undivided; False if the run was stopped half-way."""
        loss, budget = ValueLoss(UNDIVIDED, self._settings.clip), context.config.train.token_budget
        for part in self.engine.micro_batches(batch, budget, READS, batch["row"].array):
            if context.stopping.is_set():
                return False
            self._reports.append(self.engine.forward_backward(part, loss))
        values, returns, mask = (
            torch.from_numpy(batch[name].values.copy())[None] for name in (*READS, "response_mask")
        )
        self._returns += moments(returns, mask)
        self._errors += moments(returns - values, mask)
        return True

    def step(self, step: Denominators) -> dict[str, float]:
        """Divide what was added on all ranks, make the critic's optimizer step, and return its metrics."""
        mine = Valued(combine(self._reports), Measured.of(self._returns), Measured.of(self._errors))
        said = self.trainer.exchange(mine)
        self._reports.clear()
        self._returns = self._errors = Moments()
        share = step.share("token-mean")
        made = self.engine.optim_step(self._settings.lr, share)
        found = metrics(divided(combine([each.report for each in said]), share))
        explained = _explained(
            Measured.sum([each.returns for each in said]), Measured.sum([each.errors for each in said])
        )
        return {**found, "explained_variance": explained, "critic_grad_norm": made.grad_norm}

    def close(self) -> None:
        """Free everything; idempotent."""
        if self._engine is not None:
            self._engine.close()

    @property
    def _settings(self) -> Critic:
        settings = self._context.config.critic
        assert settings is not None
        return settings


def _explained(returns: Moments, errors: Moments) -> float:
    """Return the share of the returns' variance that the values had foreseen; 0 where all returns are the same."""
    return 1 - errors.squares / returns.squares if returns.squares else 0.0


def _saved(context: Context) -> Path | None:
    """Return the folder of the critic that the run goes on with."""
    folder = None if context.resume is None else context.resume / checkpoint.CRITIC
    return folder if folder is not None and folder.exists() else None


def _model(context: Context) -> ModelSpec | None:
    """Describe the model to begin or go on with; None if a warm-up has yet to leave it."""
    config, saved, kept = context.config, _saved(context), context.folder / reference.FOLDER
    assert config.critic is not None
    own = saved if saved is not None or config.critic.path is None else Path(config.critic.path)
    if own is None and config.warmup is not None and not kept.exists():
        return None
    spec = model_spec(config, tokenizer(config.model), own if own is not None else kept if kept.exists() else None)
    return replace(spec, head="value")


def _engine(context: Context, spec: ModelSpec) -> TrainEngine:
    config, train, saved = context.config, context.config.train, _saved(context)
    engine = train_engine(train.backend)(
        spec,
        optim=OptimSpec(train.betas, train.eps, train.weight_decay, train.max_grad_norm),
        temperature=config.rollout.temperature,
        options=train_options(config),
        ranks=Ranks(context.rank, train.data_parallel, context.rendezvous, config.executor.wait_timeout),
    )
    if saved is not None:
        checkpoint.load_engine(saved, engine)
    return engine
