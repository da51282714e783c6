"""Imitation: one supervised step on given answers, by which a warm-up and supervised training learn alike."""

import msgspec

from asyncflow.algorithms.aggregate import UNDIVIDED, Denominators, denominators
from asyncflow.algorithms.loss import SftLoss
from asyncflow.algorithms.report import Report
from asyncflow.stage import Context
from asyncflow.stages.trainer import Trainer
from asyncflow.storage import Batch


class Said(msgspec.Struct):
    """What a rank has added to a step."""

    rows: int
    tokens: int
    """Of prompts and answers."""
    trained: int
    """Tokens of answers."""
    report: Report


def imitate(trainer: Trainer, batch: Batch, lr: float, context: Context) -> dict[str, float] | None:
    """Make a step on the negative log-likelihood of the answers; None if the run was stopped half-way.

    The caller holds the trainer's lock; every rank brings its share of the rows.
    """
    if not trainer.add(batch, (), SftLoss(UNDIVIDED), context):
        return None
    mask = batch["response_mask"]
    trained = denominators(mask.values, mask.offsets).tokens
    tokens = sum(int(batch[name].lengths.sum()) for name in ("prompt_tokens", "response_tokens"))
    said = trainer.exchange(Said(len(batch), tokens, trained, trainer.report))
    rows = sum(each.rows for each in said)
    counted = Denominators(sum(each.trained for each in said), rows)
    made = trainer.step(lr, [each.report for each in said], counted.share("token-mean"))
    return {**made, "rows": float(rows), "tokens": float(sum(each.tokens for each in said))}
