import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncflow.algorithms.aggregate import aggregate, denominators
from asyncflow.algorithms.kl import KL
from asyncflow.algorithms.policy import POLICIES, cispo, gspo, gspo_token, pg, ppo_clip

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


@pytest.mark.parametrize(
    ("advantage", "dual_clip", "expected", "clipped"),
    [
        (-1.0, 1.5, [1.5, 0.8, 1.0], [True, False, False]),
        (-2.0, 1.5, [3.0, 1.6, 2.0], [True, False, False]),
        (-1.0, 3.0, [2.0, 0.8, 1.0], [False, False, False]),
        (1.0, 1.01, [-1.28, -0.8, -1.0], [True, False, False]),
    ],
)
def test_dual_clip_bounds_the_loss_of_negative_advantages(advantage, dual_clip, expected, clipped):
    terms = ppo_clip(new, old, torch.tensor([advantage]), mask, 0.2, 0.28, dual_clip)
    assert terms.token_loss[0, :3].tolist() == pytest.approx(expected)
    assert terms.clipped[0].tolist() == [*clipped, False]


def test_a_dual_clipped_token_has_no_gradient():
    leaf = new.clone().requires_grad_()
    ppo_clip(leaf, old, torch.tensor([-1.0]), mask, 0.2, 0.28, dual_clip=1.5).token_loss.sum().backward()
    assert leaf.grad[0].tolist() == pytest.approx([0.0, 0.8, 1.0, 0.0])


@pytest.mark.parametrize("dual_clip", [1.0, 0.5, -3.0, math.nan])
def test_a_dual_clip_must_be_greater_than_one(dual_clip):
    with pytest.raises(ValueError, match="greater than 1"):
        ppo_clip(new, old, torch.tensor([1.0]), mask, 0.2, 0.2, dual_clip)


SEQUENCE = 1.6 ** (1 / 3)
"""The geometric mean of the ratios 2, 0.8 and 1."""


@pytest.mark.parametrize("function", [gspo, gspo_token])
@pytest.mark.parametrize(
    ("advantage", "high", "expected"), [(1.0, 0.28, -SEQUENCE), (1.0, 0.1, -1.1), (-2.0, 0.1, 2 * SEQUENCE)]
)
def test_gspo_clips_the_geometric_mean(function, advantage, high, expected):
    terms = function(new, old, torch.tensor([advantage]), mask, 0.2, high)
    assert terms.token_loss[0].tolist() == pytest.approx([expected] * 3 + [0.0])
    assert terms.ratio[0].tolist() == pytest.approx([SEQUENCE] * 3 + [1.0])
    assert terms.clipped[0].tolist() == [expected == -1.1] * 3 + [False]


def test_gspo_token_gives_each_token_its_own_gradient():
    advantages = torch.tensor([[1.0, -2.0, 0.5, math.nan]], dtype=torch.float64)
    leaf = new.clone().requires_grad_()
    gspo_token(leaf, old, advantages, mask, 0.2, 0.28).token_loss.sum().backward()
    assert leaf.grad[0].tolist() == pytest.approx([-SEQUENCE, 2 * SEQUENCE, -0.5 * SEQUENCE, 0.0])


def test_with_one_advantage_for_a_row_both_forms_of_gspo_have_one_gradient():
    gradients = []
    for function in (gspo, gspo_token):
        leaf = new.clone().requires_grad_()
        terms = function(leaf, old, torch.tensor([0.7]), mask, 0.2, 0.28)
        aggregate(terms.token_loss, mask, "seq-mean-token-mean", denominators(mask)).backward()
        gradients.append(leaf.grad)
    assert gradients[0].any()
    assert torch.allclose(*gradients, atol=1e-12)


@pytest.mark.parametrize(
    ("low", "high", "expected", "clipped"),
    [
        (0.1, 0.28, [1.28, 0.9, 1.0], [True, True, False]),
        (1.0, 0.28, [1.28, 0.8, 1.0], [True, False, False]),
        (5.0, 1.5, [2.0, 0.8, 1.0], [False, False, False]),
    ],
)
@pytest.mark.parametrize("advantage", [1.0, -2.0])
def test_cispo_weighs_every_token_and_keeps_its_gradient(low, high, expected, clipped, advantage):
    leaf = new.clone().requires_grad_()
    terms = cispo(leaf, old, torch.tensor([advantage]), mask, low, high)
    values = [-w * advantage * p for w, p in zip(expected, new[0, :3].tolist(), strict=True)]
    assert terms.token_loss[0].tolist() == pytest.approx([*values, 0.0])
    terms.token_loss.sum().backward()
    assert leaf.grad[0].tolist() == pytest.approx([*(-w * advantage for w in expected), 0.0])
    assert terms.clipped[0].tolist() == [*clipped, False]


def test_pg_is_the_plain_policy_gradient():
    leaf = new.clone().requires_grad_()
    terms = pg(leaf, old, torch.tensor([1.5]), mask, 0.2, 0.2)
    assert terms.token_loss[0].tolist() == pytest.approx([*(-1.5 * new[0, :3]).tolist(), 0.0])
    assert terms.ratio[0].tolist() == pytest.approx([2.0, 0.8, 1.0, 1.0])
    assert not terms.clipped.any()
    terms.token_loss.sum().backward()
    assert leaf.grad[0].tolist() == [-1.5, -1.5, -1.5, 0.0]


@pytest.mark.parametrize("name", POLICIES)
def test_where_the_policy_did_not_move_every_loss_has_the_policy_gradient(name):
    leaf = new.clone().requires_grad_()
    terms = POLICIES[name](leaf, new, torch.tensor([1.5]), mask, 0.2, 0.28)
    terms.token_loss.sum().backward()
    assert leaf.grad[0].tolist() == pytest.approx([-1.5, -1.5, -1.5, 0.0])
    assert terms.ratio.tolist() == [[1.0] * 4]
    assert not terms.clipped.any()
