"""What several samples of each prompt say: pass@k, mean@k and maj@k. Pure Python, on correctness and answers.

A sample that has left without a score is not among them. A prompt with n samples, fewer than k, counts as it would
for k = n; one without any is left out of the average, which is NaN where none is left.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean


@dataclass(frozen=True, slots=True)
class Samples:
    """What is known of the responses to one prompt, in the order of their rollout ids."""

    correct: tuple[bool, ...]
    answers: tuple[str | None, ...]
    """None where a response has no answer."""


def pass_at(k: int, n: int, correct: int) -> float:
    """Return the chance that k of n samples, drawn without putting back, have a correct one among them.

    The unbiased estimator of Chen et al. 2021 (arXiv:2107.03374): 1 - C(n - correct, k) / C(n, k).
    """
    k = min(k, n)
    return 1.0 - math.comb(n - correct, k) / math.comb(n, k)


def mean_at(k: int, correct: Sequence[bool]) -> float:
    """Return the share of correct ones among the first k samples."""
    return fmean(correct[:k])


def majority_at(k: int, samples: Samples) -> bool:
    """Return whether the most frequent answer of the first k samples is correct; of equals, the one that came first.

    It is correct if the first response that gives it is. Responses without an answer vote for none; where all are
    such, nothing is correct.
    """
    answers = samples.answers[:k]
    votes = Counter(answer for answer in answers if answer is not None)
    if not votes:
        return False
    chosen = max(votes, key=votes.__getitem__)  # of equals the first that was counted
    return samples.correct[answers.index(chosen)]


def at_k(ks: Sequence[int], prompts: Sequence[Samples]) -> dict[str, float]:
    """Return `pass@k`, `mean@k` and `maj@k` for each k, averaged over the prompts."""
    known = [samples for samples in prompts if samples.correct]
    found: dict[str, float] = {}
    for k in ks:
        found[f"pass@{k}"] = _mean([pass_at(k, len(own.correct), sum(own.correct)) for own in known])
        found[f"mean@{k}"] = _mean([mean_at(k, own.correct) for own in known])
        found[f"maj@{k}"] = _mean([float(majority_at(k, own)) for own in known])
    return found


def _mean(values: Sequence[float]) -> float:
    return fmean(values) if values else math.nan
