"""The course of the learning rate: a pure function of the step."""

import math
from typing import Literal

Schedule = Literal["constant", "linear", "cosine"]


def learning_rate(step: int, *, peak: float, schedule: Schedule, steps: int, warmup: int = 0) -> float:
    """Return the learning rate of the optimizer step `step`, counted from 0, of `steps`.

    It rises linearly over the first `warmup` steps, the last of which has `peak`; afterwards it is constant, or
    falls to reach zero after the last step, linearly or as half a cosine (Loshchilov and Hutter 2017,
    arXiv:1608.03983).
    """
    if step < warmup:
        return peak * (step + 1) / warmup
    progress = min(1.0, (step - warmup) / max(1, steps - warmup))
    if schedule == "constant":
        return peak
    if schedule == "linear":
        return peak * (1 - progress)
    if schedule == "cosine":
        return peak * (1 + math.cos(math.pi * progress)) / 2
    raise ValueError(f"schedule {schedule!r}: constant, linear or cosine")
