"""The losses of an optimizer step, as functions of one micro-batch (`backends.base.Loss`).

What a loss is divided by belongs to the step. What it reports are sums, maxima and counts: see `report`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from asyncflow.algorithms.aggregate import Aggregate, Denominators, aggregate
from asyncflow.algorithms.corrections import (
    Level,
    Metric,
    Reduce,
    Weights,
    a3po_proximal,
    decoupled,
    icepop,
    reject,
    tis,
)
from asyncflow.algorithms.filters import FILTERS
from asyncflow.algorithms.kl import KL, unbiased
from asyncflow.algorithms.masked import masked
from asyncflow.algorithms.policy import POLICIES, PolicyTerms
from asyncflow.algorithms.ratio import log_ratio
from asyncflow.algorithms.report import Report
from asyncflow.algorithms.spread import spread
from asyncflow.algorithms.value import value_loss

if TYPE_CHECKING:
    from asyncflow.backends.base import LossOutput, MicroBatch, Scored


@dataclass(frozen=True, slots=True)
class PolicyLoss:
    """Policy loss, weighted as a correction says, + kl_coef x KL(reference) - entropy_coef x entropy.

    Reads the columns that `options.reads` names, and `truncated` (B,) for the filter `finished`. Without a
    correction the rollout's log-probabilities stand for those at the step's start: right on-policy, where they differ
    only by the two engines' rounding, which is reported as the gap. With one, those at the step's start are the
    current ones without gradient, since a step is one optimizer update; A-3PO takes what lies between the two.
    """

    denominators: Denominators
    loss: str = "ppo"
    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = None
    kl_coef: float = 0.0
    kl: str = "k3"
    kl_unbiased: bool = False
    entropy_coef: float = 0.0
    aggregate: Aggregate = "token-mean"
    aggregate_length: float | None = None
    filters: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """By part of the loss (`policy`, `kl`, `entropy`), which rows it has."""
    off_policy: str = "none"
    off_policy_level: Level = "token"
    off_policy_low: float = 0.0
    off_policy_high: float = 2.0
    off_policy_metric: Metric = "ratio"
    off_policy_reduce: Reduce = "token"
    own: Callable[..., PolicyTerms] | None = None
    """Function of the user's in place of the policy loss."""
    filtered: Mapping[str, Denominators] = field(default_factory=dict)
    """Of each part that has a filter, what it is divided by instead."""

    @property
    def entropy(self) -> bool:
        """Whether the entropy must carry gradient: `forward_backward(..., entropy=loss.entropy)`."""
        return self.entropy_coef != 0

    def __call__(self, scored: "Scored", micro_batch: "MicroBatch") -> "LossOutput":
        mask, columns = micro_batch.mask, micro_batch.columns
        behaviour, logprobs = columns["rollout_logprobs"], scored.logprobs
        old = self._old(logprobs, columns, mask)
        terms = self._policy(logprobs, old, columns["advantage"], mask)
        weights = self._weights(old, behaviour, mask)
        tokens = terms.token_loss if weights is None else terms.token_loss * weights.weight
        parts = {"policy_loss": self._reduce("policy", tokens, mask, columns)}
        sums = _ratios(terms, logprobs, behaviour, mask)
        # What `reject` rejects leaves every part, and stays in what these are divided by.
        kept = mask
        if weights is not None:
            sums |= _corrected(weights, mask, clamps=self.off_policy != "reject")
            kept = weights.kept if self.off_policy == "reject" else mask
        if self.kl_coef != 0:
            tokens = KL[self.kl](logprobs, columns["ref_logprobs"], mask)
            sums["kl"] = _sum(tokens)
            tokens = unbiased(tokens, logprobs, behaviour, mask) if self.kl_unbiased else tokens
            parts["kl_loss"] = self.kl_coef * self._reduce("kl", masked(tokens, kept), mask, columns)
        if scored.entropy is not None:
            tokens = masked(scored.entropy, mask)
            sums["entropy"] = _sum(tokens)
            if self.entropy_coef != 0:
                bonus = self._reduce("entropy", masked(tokens, kept), mask, columns)
                parts["entropy_loss"] = -self.entropy_coef * bonus
        elif self.entropy_coef != 0:
            raise ValueError("entropy_coef is not 0, but the engine gave no entropy")
        loss = torch.stack(list(parts.values())).sum()
        report = _plain({"loss": loss, **parts, **sums})
        return loss, {**report, "spread": spread(log_ratio(logprobs, behaviour, mask), mask)}

    def counts(self, part: str, mask: Tensor, columns: Mapping[str, Tensor]) -> Tensor:
        """Return the mask of a part of the loss, (B, R): without the rows that its filters leave out."""
        for name in self.filters.get(part, ()):
            chosen = FILTERS[name](columns)
            mask = mask * (chosen if chosen.ndim == mask.ndim else chosen[:, None])
        return mask

    def _old(self, logprobs: Tensor, columns: Mapping[str, Tensor], mask: Tensor) -> Tensor:
        if self.off_policy == "none":
            return columns["rollout_logprobs"]
        if self.off_policy == "a3po":
            return a3po_proximal(logprobs, columns["rollout_logprobs"], mask, columns["ages"])
        return logprobs.detach()

    def _policy(self, logprobs: Tensor, old: Tensor, advantages: Tensor, mask: Tensor) -> PolicyTerms:
        function = self.own or POLICIES[self.loss]
        if self.dual_clip is not None:
            function = partial(function, dual_clip=self.dual_clip)
        terms = function(logprobs, old, advantages, mask, self.clip_low, self.clip_high)
        if self.own is not None and (
            not isinstance(terms, PolicyTerms) or any(each.shape != mask.shape for each in terms)
        ):
            raise ValueError(
                f"train.loss {self.loss} must return PolicyTerms of shape {tuple(mask.shape)}, as the functions of "
                f"asyncflow.algorithms.policy do; found {type(terms).__name__}"
            )
        return terms

    def _weights(self, old: Tensor, behaviour: Tensor, mask: Tensor) -> Weights | None:
        low, high = self.off_policy_low, self.off_policy_high
        match self.off_policy:
            case "none":
                return None
            case "tis":
                return tis(old, behaviour, mask, low, high, self.off_policy_level)
            case "icepop":
                return icepop(old, behaviour, mask, low, high)
            case "reject":
                return reject(old, behaviour, mask, self.off_policy_metric, self.off_policy_reduce, low, high)
            case "decoupled" | "a3po":
                return decoupled(old, behaviour, mask, high)
        raise ValueError(f"off_policy {self.off_policy!r} does not exist")

    def _reduce(self, part: str, tokens: Tensor, mask: Tensor, columns: Mapping[str, Tensor]) -> Tensor:
        step = self.filtered.get(part, self.denominators)
        return aggregate(tokens, self.counts(part, mask, columns), self.aggregate, step, self.aggregate_length)


def policy_loss(
    options: Mapping[str, object],
    denominators: Denominators,
    max_response_tokens: int,
    own: Callable[..., PolicyTerms] | None = None,
) -> PolicyLoss:
    """Make the loss of a step from resolved options; `max_response_tokens` stands in for `aggregate_length`."""
    chosen: dict[str, Any] = {each.name: options[each.name] for each in fields(PolicyLoss) if each.name in options}
    chosen["aggregate_length"] = cast("float | None", options["aggregate_length"]) or max_response_tokens
    if options["kl_in"] == "reward":
        chosen["kl_coef"] = 0.0
    return PolicyLoss(denominators, own=own, **chosen)


@dataclass(frozen=True, slots=True)
class SftLoss:
    """-logπ of the trained tokens, over their number in the whole step."""

    denominators: Denominators
    entropy: bool = False

    def __call__(self, scored: "Scored", micro_batch: "MicroBatch") -> "LossOutput":
        mask = micro_batch.mask
        nll = -masked(scored.logprobs, mask)
        loss = aggregate(nll, mask, "token-mean", self.denominators)
        sums = {"loss": loss, "nll": _sum(nll), "tokens": (mask != 0).sum()}
        if scored.entropy is not None:
            sums["entropy"] = _sum(masked(scored.entropy, mask))
        return loss, _plain(sums)


@dataclass(frozen=True, slots=True)
class ValueLoss:
    """Loss of a critic's values, over the trained tokens of the whole step.

    Reads the columns `values`, those that the advantages were made of, and `returns`.
    """

    denominators: Denominators
    clip: float | None = None
    entropy: bool = False

    def __call__(self, scored: "Scored", micro_batch: "MicroBatch") -> "LossOutput":
        mask, columns = micro_batch.mask, micro_batch.columns
        if scored.values is None:
            raise ValueError("the engine's model has no value head")
        terms = value_loss(scored.values, columns["values"], columns["returns"], mask, self.clip)
        loss = aggregate(terms.token_loss, mask, "token-mean", self.denominators)
        return loss, _plain({"value_loss": loss, "value_clipped": terms.clipped.sum(), "tokens": (mask != 0).sum()})


def _ratios(terms: PolicyTerms, logprobs: Tensor, behaviour: Tensor, mask: Tensor) -> dict[str, Tensor]:
    gap = log_ratio(logprobs.detach(), behaviour, mask).abs()
    ratio = masked(terms.ratio, mask)
    return {
        "tokens": (mask != 0).sum(),
        "clipped": (terms.clipped & (mask != 0)).sum(),
        "ratio": _sum(ratio),
        "ratio_max": _largest(ratio),
        "gap": _sum(gap),
        "gap_max": _largest(gap),
    }


def _corrected(weights: Weights, mask: Tensor, *, clamps: bool) -> dict[str, Tensor]:
    return {
        "weight": _sum(weights.weight),
        "weight_max": _largest(weights.weight),
        "bounded": ((weights.weight != weights.ratio) & weights.kept).sum() * clamps,
        "rejected": ((mask != 0) & ~weights.kept).sum(),
    }


def _sum(values: Tensor) -> Tensor:
    return values.detach().sum(dtype=torch.float64)


def _largest(values: Tensor) -> Tensor:
    return values.max() if values.numel() else values.new_zeros(())


def _plain(values: Mapping[str, Tensor]) -> Report:
    numbers = torch.stack([value.detach().double() for value in values.values()]).tolist()
    return dict(zip(values, numbers, strict=True))
