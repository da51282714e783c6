"""Advantages of single tokens: discounted returns, generalised advantage estimation, distillation.

Tensors (B, R) with a mask, rewards (B,) that arrive at a row's last trained token; results are detached float64
(B, R), 0 under the mask. Tokens that are not trained (a tool's answer inside a response) are skipped: no step in
time, no discount, no value. A row without a trained token counts nowhere, whatever its reward. What REINFORCE++
whitens is given before whitening: see `whiten`.
"""

import torch
from torch import Tensor

from asyncflow.algorithms.advantages import check_finite, dr_grpo
from asyncflow.algorithms.masked import masked
from asyncflow.algorithms.ratio import log_ratio


def reinforce(rewards: Tensor, kl: Tensor | None, mask: Tensor, kl_coef: float, gamma: float) -> Tensor:
    """Return G_t = Σ γ^k r_{t+k}, where r_t = -kl_coef kl_t, plus the reward at the last token.

    REINFORCE++ (Hu 2025, arXiv:2501.03262).
    """
    return _returns(_token_rewards(rewards, kl, mask, kl_coef), mask, gamma)


def reinforce_baseline(rewards: Tensor, groups: Tensor, kl: Tensor | None, mask: Tensor, kl_coef: float) -> Tensor:
    """Return A_t = (R - mean of the group) - kl_coef kl_t: REINFORCE++-baseline (Hu 2025, arXiv:2501.03262).

    The mean is over the rows of the group with a trained token.
    """
    trains = (mask != 0).any(dim=1)
    centred = _counted(rewards, mask)
    centred[trains] = dr_grpo(centred[trains], groups[trains])
    return _without_kl(masked(centred[:, None], mask), kl, mask, kl_coef)


def gae(
    rewards: Tensor,
    values: Tensor,
    mask: Tensor,
    gamma: float,
    lam: float,
    kl: Tensor | None = None,
    kl_coef: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Return advantages and returns, both (B, R) (Schulman et al. 2015, arXiv:1506.02438).

    δ_t = r_t + γ V_{t+1} - V_t, A_t = δ_t + γ λ A_{t+1}, returns = A + V, where t + 1 is the next trained token;
    after the last there is no value.
    """
    values = masked(values.detach().double(), mask)
    following = _shifted(_backward(values, (mask == 0).double()), 1)
    delta = masked(_token_rewards(rewards, kl, mask, kl_coef) + gamma * following - values, mask)
    advantages = _returns(delta, mask, gamma * lam)
    return advantages, masked(advantages + values, mask)


def distill(student: Tensor, teacher: Tensor, mask: Tensor, coef: float) -> Tensor:
    """Return A_t = -coef (logπ of the student - logπ of the teacher), on tokens that the student sampled.

    On-policy distillation (Agarwal et al. 2023, arXiv:2306.13649), as an advantage: alone, or added to another.
    """
    return -coef * log_ratio(student.detach().double(), teacher.double(), mask)


def _token_rewards(rewards: Tensor, kl: Tensor | None, mask: Tensor, kl_coef: float) -> Tensor:
    trained = mask != 0
    last = trained & (trained.flip(1).cumsum(1).flip(1) == 1)
    return _without_kl(masked(_counted(rewards, mask)[:, None], last), kl, mask, kl_coef)


def _counted(rewards: Tensor, mask: Tensor) -> Tensor:
    rewards = masked(rewards.detach().double(), (mask != 0).any(dim=1))
    check_finite(rewards)
    return rewards


def _without_kl(rewards: Tensor, kl: Tensor | None, mask: Tensor, kl_coef: float) -> Tensor:
    return rewards if kl is None else rewards - kl_coef * masked(kl.detach().double(), mask)


def _returns(rewards: Tensor, mask: Tensor, discount: float) -> Tensor:
    decay = torch.where(mask != 0, discount, torch.ones((), dtype=torch.float64, device=mask.device))
    return masked(_backward(rewards, decay), mask)


def _backward(values: Tensor, decay: Tensor) -> Tensor:
    """Return y_t = values_t + decay_t y_{t+1} of each row, in log2(R) passes: each doubles how far a token sees."""
    reach = 1
    while reach < values.shape[1]:
        values, decay = values + decay * _shifted(values, reach), decay * _shifted(decay, reach)
        reach *= 2
    return values


def _shifted(values: Tensor, by: int) -> Tensor:
    return torch.nn.functional.pad(values[:, by:], (0, min(by, values.shape[1])))
