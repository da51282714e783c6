import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncflow.algorithms.whiten import Moments, moments, whiten


def tensor(values):
    return torch.tensor(values, dtype=torch.float64)


def test_whitening_has_the_numbers_by_hand():
    values, mask = tensor([[1.0, math.nan, 2.0], [3.0, -9999.0, math.inf]]), tensor([[1, 0, 1], [1, 0, 0]])
    measured = moments(values, mask)
    assert measured == Moments(3, 6.0, 2.0)
    assert whiten(values, mask, measured).tolist() == [
        pytest.approx([-1, 0, 0], abs=2e-6),
        pytest.approx([1, 0, 0], abs=2e-6),
    ]


lists = st.lists(st.floats(-1e3, 1e3), max_size=12)


@given(parts=st.lists(lists, min_size=1, max_size=5), offset=st.sampled_from([0.0, 1e6]))
@settings(max_examples=60, deadline=None)
def test_moments_of_ranks_add_up(parts, offset):
    ranks = [tensor([[value + offset for value in part]]) for part in parts]
    whole = torch.cat(ranks, dim=1)
    total = sum((moments(rank, torch.ones_like(rank)) for rank in ranks), Moments())
    expected = moments(whole, torch.ones_like(whole))
    assert total.count == expected.count
    assert total.mean == pytest.approx(expected.mean, abs=1e-9)
    assert total.squares == pytest.approx(expected.squares, rel=1e-6, abs=1e-6)
    if total.count > 1:
        assert total.std == pytest.approx(float(whole.std()), rel=1e-6, abs=1e-7)


@given(values=lists)
@settings(max_examples=60, deadline=None)
def test_whitened_values_have_mean_zero_and_deviation_one(values):
    rows = tensor([values])
    mask = torch.ones_like(rows)
    white = whiten(rows, mask, moments(rows, mask))
    assert white.isfinite().all()
    if len(values) > 1 and float(rows.std()) > 1e-2:
        assert float(white.mean()) == pytest.approx(0, abs=1e-6)
        assert float(white.std()) == pytest.approx(1, abs=1e-3)


@pytest.mark.parametrize("constant", [0.0, 0.1, -7.3, 1e6])
@pytest.mark.parametrize("ranks", [1, 3])
def test_constant_values_are_zero_over_any_number_of_ranks(constant, ranks):
    values = torch.full((2, 7), constant)
    mask = torch.ones(2, 7)
    total = sum((moments(values, mask) for _ in range(ranks)), Moments())
    assert not whiten(values, mask, total).any()


@pytest.mark.parametrize("mask", [[[0.0, 0.0]], [[0.0, 1.0]]])
def test_one_or_no_trained_token_is_zero(mask):
    values = torch.tensor([[math.nan, 5.0]])
    assert whiten(values, torch.tensor(mask), moments(values, torch.tensor(mask))).tolist() == [[0, 0]]


def test_a_single_token_is_whitened_by_those_of_other_ranks():
    values, mask = tensor([[4.0]]), tensor([[1.0]])
    total = moments(values, mask) + moments(tensor([[0.0, 2.0]]), tensor([[1, 1]]))
    assert float(whiten(values, mask, total)) == pytest.approx(1.0, abs=2e-6)
