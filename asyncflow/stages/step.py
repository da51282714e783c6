"""The rows of an optimizer step, as they come: what waits for its micro-batch, and what is known of all of them.

A rank of several holds a share of each group; what concerns the step as a whole follows from what all ranks say
(`Arrived` for each batch, `Trained` for the step), so that each of them comes to the same conclusion.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain

import msgspec
import numpy as np

from asyncflow.algorithms.aggregate import Denominators, denominators
from asyncflow.algorithms.report import Report
from asyncflow.execute.messages import Metric
from asyncflow.rewards.outcome import UNUSUAL
from asyncflow.storage import Batch
from asyncflow.storage.batch import Column
from asyncflow.types import Float64s, Int64s

_FROZEN = {"teacher": "teacher_logprobs", "reference": "ref_logprobs"}
"""Models that are not trained, and the column of what each says of the response tokens."""


class Arrived(msgspec.Struct):
    """What a rank says of its share of a batch."""

    kept: list[int]
    """Groups that have rows which may be trained."""
    stale: list[int]
    """Groups that have rows which are too old."""
    tokens: int
    """Tokens of the rows that this rank holds back for a micro-batch, with these."""


class Trained(msgspec.Struct):
    """What a rank says of its share of a step; the lists have one value for each row."""

    groups: list[int] = []
    rewards: list[float] = []
    outcomes: list[str] = []
    """How scoring ended."""
    signals: list[bool] = []
    """Whether any of its advantages is not 0."""
    prompts: list[int] = []
    """Prompt tokens."""
    responses: list[int] = []
    """Response tokens."""
    ages: list[int] = []
    """Staleness."""
    waited: list[int] = []
    """What of it came after the newest token."""
    tokens: int = 0
    sequences: int = 0
    stale_lengths: list[int] = []
    """Response tokens of each row that was too old."""
    stale_tokens: int = 0
    """How many tokens left the loss."""
    gaps: dict[str, float] = {}
    """Of each model that is not trained, log-probability of the policy over its own, summed over the trained tokens."""
    report: Report = {}

    @property
    def denominators(self) -> Denominators:
        """What its losses are to be divided by, together with those of the other ranks."""
        return Denominators(self.tokens, self.sequences)


@dataclass(slots=True)
class Share:
    """This rank's share of the step at hand."""

    groups: set[int] = field(default_factory=set)
    """Groups of the step so far, of all ranks."""
    ages: list[Int64s] = field(default_factory=list)
    rows: list[Int64s] = field(default_factory=list)
    """Row ids, in the order of `ages`."""
    masks: list[Column] = field(default_factory=list)
    """Which response tokens of these rows are in the loss."""
    tokens: int = 0
    """Prompt and response tokens of the rows that are held back."""
    _held: list[Batch] = field(default_factory=list)
    _said: Trained = field(default_factory=Trained)

    def take(self, batch: Batch, ages: Int64s, waited: Int64s) -> None:
        """Hold rows that are to be trained, which are that old, and have waited for so many versions of it."""
        said, counted = self._said, denominators(batch["response_mask"].values, batch["response_mask"].offsets)
        self._held.append(batch)
        self.tokens += sum(int(batch[name].lengths.sum()) for name in ("prompt_tokens", "response_tokens"))
        self.rows.append(batch["row"].array)
        self.ages.append(ages)
        self.masks.append(batch["response_mask"].copy())  # not a view, which would keep all of the batch
        said.groups += batch["group_id"].array.tolist()
        said.rewards += batch["reward"].array.tolist()
        said.outcomes += batch["reward_outcome"].strings()
        said.signals += _signals(batch["advantage"])
        said.prompts += batch["prompt_tokens"].lengths.tolist()
        said.responses += batch["response_tokens"].lengths.tolist()
        said.ages += ages.tolist()
        said.waited += waited.tolist()
        said.tokens, said.sequences = said.tokens + counted.tokens, said.sequences + counted.sequences
        for model, column in _FROZEN.items():
            if column in batch.names:
                said.gaps[model] = said.gaps.get(model, 0.0) + _gap(batch, column)

    def note_stale(self, lengths: Int64s, tokens: int) -> None:
        """Remember what was too old: the lengths of those responses, and how many tokens left the loss."""
        self._said.stale_lengths += lengths.tolist()
        self._said.stale_tokens += tokens

    def release(self) -> Batch | None:
        """Return the rows that are held back, and hold them no more; None if there was not even an empty share."""
        whole = Batch.concat(self._held) if self._held else None
        self._held.clear()
        self.tokens = 0
        return whole

    def said(self, report: Report) -> Trained:
        """Return what the other ranks are to hear of this share."""
        self._said.report = report
        return self._said


def describe(said: Sequence[Trained], *, stale: bool) -> dict[str, Metric]:
    """Summarise the rows of a step: rewards, lengths, ages; with `stale` also what was too old since the last."""
    rewards, ages = _all(each.rewards for each in said), _all(each.ages for each in said)
    responses, waited = _all(each.responses for each in said), _all(each.waited for each in said)
    found: dict[str, Metric] = {
        "reward_mean": float(rewards.mean()),
        "reward_std": float(rewards.std()),
        "advantage_zero_share": float((_all(each.signals for each in said) == 0).mean()),
        "response_tokens_mean": float(responses.mean()),
        "response_tokens_max": float(responses.max(initial=0)),
        "rows": float(len(rewards)),
        "tokens": float(responses.sum() + _all(each.prompts for each in said).sum()),
        "staleness_min": float(ages.min(initial=0)),
        "staleness_mean": float(ages.mean()),
        "staleness_max": float(ages.max(initial=0)),
        "staleness_histogram": np.bincount(ages.astype(np.int64)).tolist(),
        "staleness_in_flight_mean": float((ages - waited).mean()),
        "staleness_in_flight_max": float((ages - waited).max(initial=0)),
        "staleness_in_queue_mean": float(waited.mean()),
        "staleness_in_queue_max": float(waited.max(initial=0)),
    }
    outcomes = Counter(chain.from_iterable(each.outcomes for each in said))
    found |= {f"reward_{outcome}": float(outcomes[outcome]) for outcome in UNUSUAL}
    tokens = max(1, sum(each.tokens for each in said))
    for model in _FROZEN:
        if any(model in each.gaps for each in said):
            found[f"{model}_kl"] = sum(each.gaps.get(model, 0.0) for each in said) / tokens
    if stale:
        lengths = _all(each.stale_lengths for each in said)
        found["stale_rows"] = float(len(lengths))
        found["stale_tokens"] = float(sum(each.stale_tokens for each in said))
        # What a policy prefers shows in how long these were.
        found["stale_response_tokens_mean"] = float(lengths.mean()) if len(lengths) else 0.0
    return found


def _gap(batch: Batch, column: str) -> float:
    """Sum log policy - log model over the trained tokens; what other tokens have counts for nothing, NaN included."""
    trained = batch["response_mask"].values == 1
    policy, model = (batch[name].values[trained] for name in ("rollout_logprobs", column))
    return float(np.sum(policy - model, dtype=np.float64))


def _signals(advantages: Column) -> list[bool]:
    """Return which rows have an advantage that is not 0, whether each has one or one for each token."""
    found = advantages.values != 0
    if advantages.offsets is not None:
        owner = np.repeat(np.arange(len(advantages)), advantages.lengths)
        found = np.bincount(owner[found], minlength=len(advantages)) > 0
    signals: list[bool] = found.tolist()
    return signals


def _all(parts: Iterable[Sequence[float]]) -> Float64s:
    return np.array([value for part in parts for value in part], np.float64)
