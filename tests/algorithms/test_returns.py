import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncflow.algorithms.returns import distill, gae, reinforce, reinforce_baseline

NAN = math.nan
mask = torch.tensor([[1.0, 0.0, 1.0, 1.0, 0.0]])
kl = torch.tensor([[1.0, NAN, 2.0, 3.0, math.inf]])


def numbers(tensor):
    assert tensor.dtype == torch.float64
    return tensor[0].tolist()


def test_reinforce_discounts_over_trained_tokens_only():
    # The token rewards are -0.1, -, -0.2, 2 - 0.3, -.
    expected = [-0.1 + 0.5 * (-0.2 + 0.5 * 1.7), 0, -0.2 + 0.5 * 1.7, 1.7, 0]
    assert numbers(reinforce(torch.tensor([2.0]), kl, mask, 0.1, 0.5)) == pytest.approx(expected)


def test_reinforce_without_kl_or_discount_is_the_reward():
    assert numbers(reinforce(torch.tensor([2.0]), None, mask, 0.1, 1.0)) == [2, 0, 2, 2, 0]


def test_reinforce_baseline_has_the_numbers_by_hand():
    trained = torch.tensor([[1.0, 1.0], [1.0, 0.0], [0.0, 0.0], [1.0, 1.0]])
    rewards = torch.tensor([1.0, 0.0, NAN, 5.0], dtype=torch.float64)
    kl = torch.tensor([[1.0, 2.0], [3.0, NAN], [NAN, NAN], [0.0, -1.0]], dtype=torch.float64)
    found = reinforce_baseline(rewards, torch.tensor([4, 4, 4, 9]), kl, trained, 0.1)
    expected = torch.tensor([[0.4, 0.3], [-0.8, 0.0], [0.0, 0.0], [0.0, 0.1]], dtype=torch.float64)
    assert torch.allclose(found, expected)


def test_gae_bootstraps_from_the_next_trained_value():
    values = torch.tensor([[0.5, 200.0, 0.25, 1.0, NAN]])
    advantages, returns = gae(torch.tensor([3.0]), values, mask, 0.5, 0.8)
    last = 3 - 1.0
    middle = 0.5 * 1.0 - 0.25 + 0.4 * last
    first = 0.5 * 0.25 - 0.5 + 0.4 * middle
    assert numbers(advantages) == pytest.approx([first, 0, middle, last, 0])
    assert numbers(returns) == pytest.approx([first + 0.5, 0, middle + 0.25, last + 1.0, 0])


def test_gae_takes_the_kl_from_the_rewards():
    still = torch.zeros(1, 5)
    advantages, returns = gae(torch.tensor([3.0]), still, mask, 1.0, 1.0, kl, 0.5)
    assert numbers(advantages) == pytest.approx([0.0, 0, 0.5, 1.5, 0])
    assert torch.equal(advantages, returns)


def test_distillation_is_the_negative_distance_to_the_teacher():
    student, teacher = torch.tensor([[-1.0, NAN, -2.0]]), torch.tensor([[-3.0, -200.0, -0.5]])
    assert numbers(distill(student, teacher, torch.tensor([[1, 0, 1]]), 0.5)) == [-1.0, 0.0, 0.75]


rows = st.lists(st.lists(st.tuples(st.booleans(), st.floats(-3, 3), st.floats(-3, 3)), min_size=7, max_size=7),
                min_size=1, max_size=4)  # fmt: skip
rates = st.floats(0, 1)


def by_hand(reward, row, gamma, lam, kl_coef):
    """Walk backwards over the trained tokens of one row: the definition, one token after the other."""
    advantage, value, following, first = 0.0, 0.0, [], True
    for trained, kl, current in reversed(row):
        if trained:
            delta = (reward if first else 0.0) - kl_coef * kl + gamma * value - current
            advantage, value, first = delta + gamma * lam * advantage, current, False
        following.insert(0, advantage if trained else 0.0)
    return following


@given(rows=rows, gamma=rates, lam=rates, kl_coef=rates, reward=st.floats(-2, 2))
@settings(max_examples=60, deadline=None)
def test_gae_and_reinforce_follow_their_recurrence(rows, gamma, lam, kl_coef, reward):
    trained, kl, values = torch.tensor(rows, dtype=torch.float64).unbind(-1)
    rewards = torch.full((len(rows),), reward, dtype=torch.float64)
    advantages, returns = gae(rewards, values, trained, gamma, lam, kl, kl_coef)
    expected = torch.tensor([by_hand(reward, row, gamma, lam, kl_coef) for row in rows], dtype=torch.float64)
    assert torch.allclose(advantages, expected, atol=1e-12)
    assert torch.allclose(returns, (expected + values) * trained, atol=1e-12)
    # With λ = 1 the values cancel: what is returned is the discounted return.
    _, returns = gae(rewards, values, trained, gamma, 1.0, kl, kl_coef)
    assert torch.allclose(returns, reinforce(rewards, kl, trained, kl_coef, gamma), atol=1e-12)


def test_the_reward_of_a_row_without_trained_tokens_may_be_anything():
    trained = torch.tensor([[0.0, 0.0], [1.0, 1.0]])
    assert reinforce(torch.tensor([NAN, 1.0]), None, trained, 0.0, 1.0).tolist() == [[0, 0], [1, 1]]


@pytest.mark.parametrize(
    "function",
    [
        lambda rewards, trained: reinforce(rewards, None, trained, 0.0, 1.0),
        lambda rewards, trained: reinforce_baseline(rewards, torch.zeros(2, dtype=torch.int64), None, trained, 0.0),
        lambda rewards, trained: gae(rewards, torch.zeros(2, 2), trained, 1.0, 1.0),
    ],
)
def test_rewards_that_are_not_finite_are_refused_by_position(function):
    with pytest.raises(ValueError, match="position 1"):
        function(torch.tensor([NAN, math.inf]), torch.tensor([[0.0, 0.0], [1.0, 1.0]]))


def test_long_rows_are_quick_and_exact():
    advantages = reinforce(torch.tensor([1.0]), None, torch.ones(1, 40_000), 0.0, 0.999)
    assert numbers(advantages)[-1000] == pytest.approx(0.999**999, rel=1e-12)
