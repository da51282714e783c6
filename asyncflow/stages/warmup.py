"""Warm-up: supervised steps on given answers, on the engine that is then trained by reinforcement."""

from collections.abc import Iterator

import msgspec

from asyncflow.algorithms.aggregate import UNDIVIDED, Denominators, denominators
from asyncflow.algorithms.loss import SftLoss
from asyncflow.algorithms.report import Report
from asyncflow.algorithms.schedule import learning_rate
from asyncflow.execute.messages import Stepped
from asyncflow.stage import Context, Done
from asyncflow.stages.trainer import Trainer
from asyncflow.storage import Batch


class Said(msgspec.Struct):
    """What a rank has added to a step."""

    tokens: int
    sequences: int
    report: Report


class Warmup:
    """Reads prompt and response tokens of a given answer; the loss is their negative log-likelihood."""

    def setup(self, context: Context) -> None:
        self._context, self._trainer = context, Trainer.of(context)

    def process(self, batch: Batch) -> Iterator[Done]:
        train, warmup = self._context.config.train, self._context.config.warmup
        assert warmup is not None
        trainer = self._trainer
        lr = learning_rate(
            trainer.warmups, peak=warmup.lr, schedule=train.schedule, steps=warmup.steps, warmup=train.lr_warmup
        )
        with trainer.lock:
            if not trainer.add(batch, (), SftLoss(UNDIVIDED), self._context):
                return
            mask = batch["response_mask"]
            mine = denominators(mask.values, mask.offsets)
            said = trainer.exchange(Said(mine.tokens, mine.sequences, trainer.report))
            counted = sum((Denominators(each.tokens, each.sequences) for each in said), Denominators(0, 0))
            made = trainer.step(lr, [each.report for each in said], counted.share("token-mean"))
            trainer.warmups += 1
            version = trainer.engine.version
            yield Done(version)
            if trainer.leads:
                self._context.emit(Stepped("warmup", version, made))

    def close(self) -> None:
        self._trainer.close()
