import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncflow.algorithms.kl import KL
from asyncflow.algorithms.policy import ppo_clip

new = torch.tensor([[0.5, 0.2, 0.3, 0.6]], dtype=torch.float64).log()
old = torch.tensor([[0.25, 0.25, 0.3, 0.2]], dtype=torch.float64).log()
mask = torch.tensor([[1.0, 1.0, 1.0, 0.0]])
POISON = [math.nan, math.inf, -math.inf, -9999.0]


@pytest.mark.parametrize(("advantage", "expected"), [(1.0, [-1.28, -0.8, -1.0, 0.0]), (-1.0, [2.0, 0.8, 1.0, 0.0])])
def test_ppo_clip_has_the_golden_numbers(advantage, expected):
    terms = ppo_clip(new, old, torch.tensor([advantage]), mask, 0.2, 0.28)
    assert terms.token_loss[0].tolist() == pytest.approx(expected, abs=1e-9)
    assert terms.ratio[0].tolist() == pytest.approx([2.0, 0.8, 1.0, 1.0])
    assert terms.clipped[0].tolist() == [advantage > 0, False, False, False]


def _ppo(logprobs, reference, mask, advantage):
    return ppo_clip(logprobs, reference, advantage, mask, 0.2, 0.2).token_loss


@pytest.mark.parametrize("name", [*KL, "ppo"])
@given(
    values=st.lists(st.tuples(st.floats(-8, 0), st.floats(-8, 0), st.booleans()), min_size=1, max_size=8),
    poison=st.sampled_from(POISON),
    other=st.sampled_from(POISON),
)
@settings(max_examples=25, deadline=None)
def test_nothing_under_the_mask_counts(name, values, poison, other):
    mask = torch.tensor([[float(kept) for _, _, kept in values]])
    hidden = mask == 0

    def run(first, second, third):
        logprobs = torch.tensor([[v[0] for v in values]]).masked_fill(hidden, first).requires_grad_()
        reference = torch.tensor([[v[1] for v in values]]).masked_fill(hidden, second)
        advantage = torch.full(mask.shape, 1.5).masked_fill(hidden, third)
        terms = _ppo(logprobs, reference, mask, advantage) if name == "ppo" else KL[name](logprobs, reference, mask)
        terms.sum().backward()
        return terms.detach(), logprobs.grad

    (clean, gradient), (dirty, dirty_gradient) = run(0.0, 0.0, 0.0), run(poison, other, poison)
    assert torch.equal(clean, dirty)
    assert torch.equal(gradient, dirty_gradient)
    assert not gradient[hidden].any()


def test_the_advantage_of_a_masked_row_may_be_anything():
    terms = ppo_clip(new, old, torch.tensor([math.nan]), torch.zeros(1, 4), 0.2, 0.2)
    assert terms.token_loss.tolist() == [[0.0] * 4]


def test_huge_ratios_stay_finite():
    logprobs = torch.tensor([[0.0, -200.0]], requires_grad=True)
    loss = ppo_clip(logprobs, torch.tensor([[-200.0, 0.0]]), torch.tensor([1.0]), torch.ones(1, 2), 0.2, 0.2)
    loss.token_loss.sum().backward()
    assert loss.token_loss.isfinite().all()
    assert logprobs.grad.isfinite().all()


def test_the_old_policy_gets_no_gradient():
    reference = old.clone().requires_grad_()
    terms = ppo_clip(new.clone().requires_grad_(), reference, torch.tensor([1.0]), mask, 0.2, 0.2)
    terms.token_loss.sum().backward()
    assert reference.grad is None


@pytest.mark.parametrize(
    ("name", "formula"),
    [
        ("k1", lambda d: d),
        ("k2", lambda d: d * d / 2),
        ("k3", lambda d: math.exp(-d) - 1 + d),
    ],
)
def test_kl_estimators_follow_their_formula(name, formula):
    expected = [formula(d) for d in (new - old)[0, :3].tolist()]
    assert KL[name](new, old, mask)[0].tolist() == pytest.approx([*expected, 0.0])
