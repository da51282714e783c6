import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncflow.algorithms.advantages import ADVANTAGES, dr_grpo, grpo, maxrl, rloo, signal

GOLDEN = {
    "unbiased": [1.154699, -0.577349, -0.577349],
    "biased": [1.414211, -0.707105, -0.707105],
    "dr_grpo": [0.666667, -0.333333, -0.333333],
    "rloo": [1.0, -0.5, -0.5],
    "maxrl": [2.0, -1.0, -1.0],
}
rewards = torch.tensor([1.0, 0.0, 0.0])
one_group = torch.zeros(3, dtype=torch.int64)


@pytest.mark.parametrize("std", ["unbiased", "biased"])
def test_grpo_has_the_golden_numbers(std):
    assert grpo(rewards, one_group, std).tolist() == pytest.approx(GOLDEN[std], abs=1e-6)


@pytest.mark.parametrize("function", [dr_grpo, rloo, maxrl])
def test_advantage_has_the_golden_numbers(function):
    assert function(rewards, one_group).tolist() == pytest.approx(GOLDEN[function.__name__], abs=1e-6)


@pytest.mark.parametrize("function", list(ADVANTAGES.values()))
@pytest.mark.parametrize("reward", [0.0, 0.1, -3.7, 1e6])
def test_groups_without_signal_have_advantage_zero(function, reward):
    groups = torch.tensor([7, 7, 7, 2])
    assert function(torch.full((4,), reward, dtype=torch.float32), groups).tolist() == [0.0] * 4


@pytest.mark.parametrize("function", list(ADVANTAGES.values()))
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_rewards_that_are_not_finite_are_refused_by_position(function, value):
    with pytest.raises(ValueError, match="position 2"):
        function(torch.tensor([0.0, 1.0, value]), one_group)


def test_lengths_must_agree():
    with pytest.raises(ValueError, match="one length"):
        grpo(rewards, one_group[:2])


def test_no_rows_have_no_advantages():
    assert grpo(torch.zeros(0), torch.zeros(0, dtype=torch.int64)).shape == (0,)


rows = st.lists(st.tuples(st.integers(-(2**62), 2**62) | st.integers(0, 3), st.floats(-10, 10, width=32)), max_size=30)


@pytest.mark.parametrize("function", list(ADVANTAGES.values()))
@given(rows=rows, seed=st.randoms(use_true_random=False))
@settings(max_examples=25, deadline=None)
def test_groups_are_found_by_id_in_any_order(function, rows, seed):
    order = list(range(len(rows)))
    seed.shuffle(order)
    groups = torch.tensor([row[0] for row in rows], dtype=torch.int64)
    values = torch.tensor([row[1] for row in rows], dtype=torch.float32)
    shuffled = function(values[order], groups[order])
    assert torch.allclose(function(values, groups)[order], shuffled, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("function", list(ADVANTAGES.values()))
@given(rows=rows)
@settings(max_examples=25, deadline=None)
def test_a_group_does_not_feel_the_others(function, rows):
    groups = torch.tensor([row[0] for row in rows], dtype=torch.int64)
    values = torch.tensor([row[1] for row in rows], dtype=torch.float32)
    whole = function(values, groups)
    assert whole.isfinite().all()
    for group in set(groups.tolist()):
        inside = groups == group
        assert torch.allclose(whole[inside], function(values[inside], groups[inside]), rtol=1e-9, atol=1e-9)
        assert abs(float(whole[inside].sum())) < 1e-6 * max(1.0, float(whole.abs().max()))


@pytest.mark.parametrize("values", [[0.0, 0.0, 0.0], [1.0, -1.0, 0.0], [-1.0, 0.0, -1.0], [0.1, -0.1, 1e-18]])
def test_maxrl_is_zero_where_the_mean_is_not_above_zero(values):
    assert maxrl(torch.tensor(values), one_group).tolist() == [0.0] * 3


def test_maxrl_weighs_a_rare_success_more():
    values, groups = torch.tensor([1.0, 0.0, 1.0, 1.0, 1.0, 0.0, 0.0]), torch.tensor([0, 0, 5, 5, 5, 5, 7])
    expected = [1.0, -1.0, 1 / 3, 1 / 3, 1 / 3, -1.0, 0.0]
    assert maxrl(values, groups).tolist() == pytest.approx(expected)


def test_signal_is_that_of_the_group():
    values = torch.tensor([1.0, 0.3, 0.0, 0.3, 1.0, 2.0, 2.0 + 1e-7], dtype=torch.float64)
    groups = torch.tensor([4, 9, 4, 9, 1, -2, -2])
    assert signal(values, groups).tolist() == [True, False, True, False, False, False, False]


@given(rows=rows)
@settings(max_examples=25, deadline=None)
def test_a_group_without_signal_is_one_with_advantage_zero(rows):
    groups = torch.tensor([row[0] for row in rows], dtype=torch.int64)
    values = torch.tensor([row[1] for row in rows], dtype=torch.float32)
    without = ~signal(values, groups)
    assert not dr_grpo(values, groups)[without].any()
    for group in groups[~without].unique():
        assert dr_grpo(values, groups)[groups == group].any()
