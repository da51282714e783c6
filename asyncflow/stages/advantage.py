"""Advantage: whole groups of scores in, one advantage for each response or token out, as the options say."""

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from asyncflow.algorithms import options as choices
from asyncflow.algorithms.advantages import ADVANTAGES, signal
from asyncflow.algorithms.kl import KL
from asyncflow.algorithms.masked import masked
from asyncflow.algorithms.overlong import overlong
from asyncflow.algorithms.returns import distill, gae, reinforce, reinforce_baseline
from asyncflow.config.importing import resolve
from asyncflow.errors import PipelineError, RewardError
from asyncflow.stage import Context, Drop, Part
from asyncflow.storage import Batch
from asyncflow.storage.batch import Column

NO_SIGNAL = "no_signal"
"""Why the rows of a group leave whose rewards are all equal, with `dynamic_sampling`."""


class Advantage:
    """Reads the column that `train.reward` names, and what `options.scores` says; writes `advantage`.

    With GAE it also writes `returns`, what the critic's values are trained towards.
    """

    def setup(self, context: Context) -> None:
        self._train, self._longest = context.config.train, context.config.rollout.max_response_tokens
        self._options = self._train.algorithm_options
        own = self._train.advantage
        self._own = resolve(own) if choices.is_path(own) else None

    def process(self, batch: Batch) -> Iterator[Part | Drop]:
        rewards, groups = torch.tensor(self._finite(batch)), torch.tensor(batch["group_id"].array)
        kept = torch.ones(len(batch), dtype=torch.bool)
        if self._train.dynamic_sampling:
            kept = signal(rewards, groups)
            if not kept.all():
                yield Drop((~kept).nonzero()[:, 0].numpy(), NO_SIGNAL)
        if kept.any():
            rows = kept.nonzero()[:, 0]
            yield Part(rows.numpy(), self._columns(batch.take(rows.numpy()), rewards[rows], groups[rows]))

    def _columns(self, batch: Batch, rewards: Tensor, groups: Tensor) -> Batch:
        train, options = self._train, self._options
        rewards = rewards.double()
        if train.overlong:
            buffer = max(1, round(train.overlong * self._longest))
            rewards = rewards + torch.from_numpy(overlong(batch["response_mask"].lengths, self._longest, buffer))
        if not choices.by_token(options) and not choices.kl_in_reward(options):
            return Batch({"advantage": self._by_row(rewards, groups).numpy()})
        mask = _padded(batch, "response_mask")
        kl = None
        if choices.kl_in_reward(options):
            kl = KL[train.kl](_padded(batch, "rollout_logprobs"), _padded(batch, "ref_logprobs"), mask).double()
        if not choices.by_token(options):
            assert kl is not None
            return Batch({"advantage": self._by_row(rewards - train.kl_coef * kl.sum(dim=1), groups).numpy()})
        found = self._by_token(batch, rewards, groups, mask, kl)
        if train.distill_coef:
            teacher = _padded(batch, "teacher_logprobs")
            found["advantage"] += distill(_padded(batch, "rollout_logprobs"), teacher, mask, train.distill_coef)
        return Batch({name: _ragged(values, batch["response_mask"]) for name, values in found.items()})

    def _by_row(self, rewards: Tensor, groups: Tensor) -> Tensor:
        """Return the advantages of whole responses, float64 (N,)."""
        name = self._train.advantage
        if self._own is not None:
            found = torch.as_tensor(self._own(rewards, groups)).double()
            if found.shape != rewards.shape or not found.isfinite().all():
                raise PipelineError(
                    f"train.advantage {name} returned {tuple(found.shape)} for {len(rewards)} rewards, or values that "
                    "are not finite: return one finite number for each"
                )
            return found
        if name == "none":
            return torch.zeros_like(rewards)
        return ADVANTAGES[name](rewards, groups, **({"std": self._train.std} if name == "grpo" else {}))

    def _by_token(
        self, batch: Batch, rewards: Tensor, groups: Tensor, mask: Tensor, kl: Tensor | None
    ) -> dict[str, Tensor]:
        """Return the advantages of single tokens, float64 (N, R), and the returns if there is a critic."""
        train, coef = self._train, self._train.kl_coef
        match train.advantage:
            case "reinforce++":
                return {"advantage": reinforce(rewards, kl, mask, coef, train.gamma)}
            case "reinforce++-baseline":
                return {"advantage": reinforce_baseline(rewards, groups, kl, mask, coef)}
            case "gae":
                values = _padded(batch, "values")
                advantage, returns = gae(rewards, values, mask, train.gamma, train.gae_lambda, kl, coef)
                return {"advantage": advantage, "returns": returns}
        less = 0.0 if kl is None else coef * kl.sum(dim=1)
        return {"advantage": masked(self._by_row(rewards - less, groups)[:, None], mask)}

    def _finite(self, batch: Batch) -> npt.NDArray[np.number]:
        """Return the rewards; RewardError where one is not a finite number: scoring lets none through."""
        column = self._train.reward
        found: npt.NDArray[np.number] = batch[column].array
        wrong = np.flatnonzero(~np.isfinite(found))
        if wrong.size:
            raise RewardError(
                f"column {column} of row {batch['row'].array[wrong[0]]} is {found[wrong[0]]}, and of {wrong.size - 1} "
                "others no finite number either: mend the stage that writes it, or have it drop such rows"
            )
        return found

    def close(self) -> None:
        return None


def _padded(batch: Batch, name: str) -> Tensor:
    return torch.from_numpy(batch[name].to_padded()[0].copy())


def _ragged(values: Tensor, like: Column) -> Column:
    """Cut padded values (N, R) to the lengths of a ragged column."""
    assert like.offsets is not None
    inside = np.arange(values.shape[1]) < like.lengths[:, None]
    return Column.ragged(values.numpy()[inside].astype(np.float32), like.offsets - like.offsets[0], "list<float32>")
