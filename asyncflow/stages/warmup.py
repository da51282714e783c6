"""Warm-up: supervised steps on given answers, on the engine that is then trained by reinforcement."""

from collections.abc import Iterator

from asyncflow.algorithms.schedule import learning_rate
from asyncflow.execute.messages import Stepped
from asyncflow.stage import Context, Done
from asyncflow.stages.imitation import imitate
from asyncflow.stages.trainer import Trainer
from asyncflow.storage import Batch


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
            made = imitate(trainer, batch, lr, self._context)
            if made is None:
                return
            trainer.warmups += 1
            version = trainer.engine.version
            yield Done(version)
            if trainer.leads:
                self._context.emit(Stepped("warmup", version, made))

    def close(self) -> None:
        self._trainer.close()
