"""How good a response was against the others of its group.

Rewards (N,) and group ids int64 (N,) in any order; advantages float64 (N,). Statistics are float64. A group
without signal (one row, or a standard deviation of at most 1e-6) has advantage 0.
"""

from collections.abc import Callable, Mapping
from typing import Literal, NamedTuple

import torch
from torch import Tensor

NO_SIGNAL = 1e-6
"""A group whose rewards have at most this standard deviation says nothing."""

Std = Literal["unbiased", "biased"]


class _Groups(NamedTuple):
    """Each entry belongs to a row: its distance from its group's mean, and that mean, sum of squares and size."""

    centred: Tensor
    mean: Tensor
    squares: Tensor
    size: Tensor

    def std(self, kind: Std) -> Tensor:
        degrees = self.size - 1 if kind == "unbiased" else self.size
        return (self.squares / degrees.clamp(min=1)).sqrt()

    def signal(self, advantage: Tensor, std: Tensor) -> Tensor:
        return torch.where(std > NO_SIGNAL, advantage, torch.zeros_like(advantage))


def check_finite(rewards: Tensor) -> None:
    """Refuse rewards (N,) of which one is NaN or infinite: it would reach the advantages of others."""
    wrong = (~torch.isfinite(rewards)).nonzero()
    if len(wrong):
        position = int(wrong[0])
        raise ValueError(f"reward at position {position} is {float(rewards[position])}; rewards must be finite")


def _grouped(rewards: Tensor, groups: Tensor) -> _Groups:
    if rewards.ndim != 1 or rewards.shape != groups.shape:
        raise ValueError(f"rewards {tuple(rewards.shape)} and groups {tuple(groups.shape)} must be of one length")
    check_finite(rewards)
    rewards = rewards.double()
    _, group, size = torch.unique(groups, return_inverse=True, return_counts=True)
    sums = torch.zeros(len(size), dtype=torch.float64, device=rewards.device)
    mean = (sums.index_add(0, group, rewards) / size)[group]
    centred = rewards - mean
    squares = sums.index_add(0, group, centred**2)
    return _Groups(centred, mean, squares[group], size[group])


def grpo(rewards: Tensor, groups: Tensor, std: Std = "unbiased") -> Tensor:
    """A = (R - mean) / (std + 1e-6) (Shao et al. 2024, arXiv:2402.03300)."""
    group = _grouped(rewards, groups)
    spread = group.std(std)
    return group.signal(group.centred / (spread + 1e-6), spread)


def dr_grpo(rewards: Tensor, groups: Tensor) -> Tensor:
    """A = R - mean (Liu et al. 2025, arXiv:2503.20783)."""
    group = _grouped(rewards, groups)
    return group.signal(group.centred, group.std("unbiased"))


def rloo(rewards: Tensor, groups: Tensor) -> Tensor:
    """A = R - mean of the others, which is (R - mean) n / (n - 1) (Ahmadian et al. 2024, arXiv:2402.14740)."""
    group = _grouped(rewards, groups)
    others = (group.size - 1).clamp(min=1)
    return group.signal(group.centred * group.size / others, group.std("unbiased"))


def maxrl(rewards: Tensor, groups: Tensor) -> Tensor:
    """A = (R - mean) / mean, 0 where the mean is not above 0 (Tajwar et al. 2026, arXiv:2602.02710).

    Made for rewards of 0 and 1, whose mean is the share of successes. A negative mean would turn every sign round.
    """
    group = _grouped(rewards, groups)
    succeeds = group.mean > NO_SIGNAL
    advantage = torch.where(succeeds, group.centred / torch.where(succeeds, group.mean, 1.0), 0.0)
    return group.signal(advantage, group.std("unbiased"))


def signal(rewards: Tensor, groups: Tensor) -> Tensor:
    """Return, bool (N,), whether a row's group says anything: its standard deviation is above `NO_SIGNAL`."""
    return _grouped(rewards, groups).std("unbiased") > NO_SIGNAL


ADVANTAGES: Mapping[str, Callable[..., Tensor]] = {"grpo": grpo, "dr_grpo": dr_grpo, "rloo": rloo, "maxrl": maxrl}
"""By the name that `options.Algorithm.advantage` holds; `grpo` alone takes `std`."""
