"""SFT: supervised training as the main phase, on given answers, with the settings of `train`."""

from collections.abc import Iterator

from asyncflow.algorithms.schedule import learning_rate
from asyncflow.config.model import Pipeline
from asyncflow.execute.messages import Stepped
from asyncflow.stage import Done
from asyncflow.stages.imitation import imitate
from asyncflow.stages.train import Train
from asyncflow.storage import Batch


class Sft(Train):
    """Reads prompt and response tokens of a given answer; publishes, and is saved, as `Train` is.

    A batch is a step. Weights are published only where they are evaluated: nobody else needs them.
    """

    def process(self, batch: Batch) -> Iterator[Done]:
        config, train, trainer = self._context.config, self._context.config.train, self.trainer
        lr = learning_rate(
            self._step, peak=train.lr, schedule=train.schedule, steps=train.steps, warmup=train.lr_warmup
        )
        with trainer.lock:
            if config.mode == "colocated":
                trainer.engine.wake()
            made = imitate(trainer, batch, lr, self._context)
            if made is None:
                return
            self._step += 1
            if _evaluated(config, self._step):
                if config.mode == "colocated":
                    trainer.engine.sleep()
                trainer.publish()
            version = trainer.engine.version
            yield Done(version)
            if trainer.leads:
                self._context.emit(Stepped("train", version, made, rows=int(made["rows"])))


def _evaluated(config: Pipeline, step: int) -> bool:
    every = config.eval.every
    return config.eval.rows > 0 and (step == config.train.steps or (every > 0 and step % every == 0))
