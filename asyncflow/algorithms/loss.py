"""The losses of an optimizer step, as functions of one micro-batch (`backends.base.Loss`).

A loss is made anew for each step, since it holds the step's denominators. What it reports are sums and maxima:
see `report`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from asyncflow.algorithms.aggregate import Aggregate, Denominators, aggregate
from asyncflow.algorithms.kl import KL
from asyncflow.algorithms.masked import masked
from asyncflow.algorithms.policy import PolicyTerms, ppo_clip

if TYPE_CHECKING:
    from asyncflow.backends.base import LossOutput, MicroBatch, Scored


@dataclass(frozen=True, slots=True)
class PolicyLoss:
    """Clipped policy loss + kl_coef x KL(reference) - entropy_coef x entropy, all aggregated alike.

    Reads the columns `advantage` (B,) and `rollout_logprobs` (B, R), and `ref_logprobs` (B, R) if `kl_coef` is
    not 0. The rollout's log-probabilities stand for those at the step's start: right on-policy, where they differ
    only by the two engines' rounding, which is reported as the gap.
    """

    denominators: Denominators
    clip_low: float = 0.2
    clip_high: float = 0.2
    kl_coef: float = 0.0
    kl: str = "k3"
    entropy_coef: float = 0.0
    aggregate: Aggregate = "token-mean"
    aggregate_length: float | None = None

    @property
    def entropy(self) -> bool:
        """Whether the entropy must carry gradient: `forward_backward(..., entropy=loss.entropy)`."""
        return self.entropy_coef != 0

    def __call__(self, scored: "Scored", micro_batch: "MicroBatch") -> "LossOutput":
        mask, columns = micro_batch.mask, micro_batch.columns
        old = columns["rollout_logprobs"]
        terms = ppo_clip(scored.logprobs, old, columns["advantage"], mask, self.clip_low, self.clip_high)
        parts = {"policy_loss": self._reduce(terms.token_loss, mask)}
        sums = _ratios(terms, scored.logprobs, old, mask)
        loss = parts["policy_loss"]
        if self.kl_coef != 0:
            tokens = KL[self.kl](scored.logprobs, columns["ref_logprobs"], mask)
            parts["kl_loss"] = self.kl_coef * self._reduce(tokens, mask)
            loss = loss + parts["kl_loss"]
            sums["kl"] = _sum(tokens)
        if scored.entropy is not None:
            tokens = masked(scored.entropy, mask)
            sums["entropy"] = _sum(tokens)
            if self.entropy_coef != 0:
                parts["entropy_loss"] = -self.entropy_coef * self._reduce(tokens, mask)
                loss = loss + parts["entropy_loss"]
        elif self.entropy_coef != 0:
            raise ValueError("entropy_coef is not 0, but the engine gave no entropy")
        return loss, _plain({"loss": loss, **parts, **sums})

    def _reduce(self, tokens: Tensor, mask: Tensor) -> Tensor:
        return aggregate(tokens, mask, self.aggregate, self.denominators, self.aggregate_length)


def policy_loss(options: Mapping[str, object], denominators: Denominators, max_response_tokens: int) -> PolicyLoss:
    """Make the loss of a step from resolved options; `max_response_tokens` stands in for `aggregate_length`."""
    names = ("clip_low", "clip_high", "kl_coef", "kl", "entropy_coef", "aggregate")
    length = cast("float | None", options["aggregate_length"]) or max_response_tokens
    chosen = cast("dict[str, float]", {name: options[name] for name in names})
    return PolicyLoss(denominators, aggregate_length=length, **chosen)  # type: ignore[arg-type]


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


def _ratios(terms: PolicyTerms, logprobs: Tensor, old: Tensor, mask: Tensor) -> dict[str, Tensor]:
    gap = (masked(logprobs.detach(), mask) - masked(old, mask)).abs()
    ratio = masked(terms.ratio, mask)
    return {
        "tokens": (mask != 0).sum(),
        "clipped": terms.clipped.sum(),
        "ratio": _sum(ratio),
        "ratio_max": _largest(ratio),
        "gap": _sum(gap),
        "gap_max": _largest(gap),
    }


def _sum(values: Tensor) -> Tensor:
    return values.detach().sum(dtype=torch.float64)


def _largest(values: Tensor) -> Tensor:
    return values.max() if values.numel() else values.new_zeros(())


def _plain(values: Mapping[str, Tensor]) -> dict[str, float]:
    numbers = torch.stack([value.detach().double() for value in values.values()]).tolist()
    return dict(zip(values, numbers, strict=True))
