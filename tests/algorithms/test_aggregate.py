import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncflow.algorithms.aggregate import AGGREGATES, Denominators, aggregate, denominators

loss = torch.tensor([[1.0] * 2 + [math.nan] * 4, [4.0] * 6])
mask = torch.tensor([[1.0] * 2 + [0.0] * 4, [1.0] * 6])


@pytest.mark.parametrize(("how", "expected"), list(zip(AGGREGATES, [3.25, 2.5, 13.0, 1.3], strict=True)))
def test_aggregation_has_the_golden_numbers(how, expected):
    assert float(aggregate(loss, mask, how, denominators(mask), length=10)) == pytest.approx(expected)


def test_ppo_token_mean_has_the_golden_number():
    tokens = torch.tensor([[-1.28, -0.8, -1.0, -9999.0]], dtype=torch.float64)
    kept = torch.tensor([[1.0, 1.0, 1.0, 0.0]])
    assert float(aggregate(tokens, kept, "token-mean", denominators(kept))) == pytest.approx(-1.026667, abs=1e-6)


masks = st.lists(st.lists(st.booleans(), min_size=5, max_size=5), min_size=1, max_size=8)


@pytest.mark.parametrize("how", AGGREGATES)
@given(rows=masks, cuts=st.sets(st.integers(1, 7)), seed=st.integers(0, 1000))
@settings(max_examples=25, deadline=None)
def test_parts_add_up_to_the_whole(how, rows, cuts, seed):
    kept = torch.tensor(rows, dtype=torch.float32)
    values = torch.randn(kept.shape, generator=torch.Generator().manual_seed(seed)).requires_grad_()
    step = denominators(kept)
    whole = aggregate(values, kept, how, step, length=3)
    (gradient,) = torch.autograd.grad(whole, values)
    parts = [
        (v, k)
        for v, k in zip(torch.tensor_split(values, sorted(cuts)), torch.tensor_split(kept, sorted(cuts)), strict=True)
    ]
    total = sum(aggregate(v, k, how, step, length=3) for v, k in parts)
    (split,) = torch.autograd.grad(total, values)
    assert float(total.detach()) == pytest.approx(float(whole.detach()), abs=1e-9)
    assert torch.allclose(gradient, split, atol=1e-9)


@pytest.mark.parametrize("how", AGGREGATES)
def test_padding_and_empty_rows_change_nothing(how):
    step = denominators(mask)
    wide = torch.nn.functional.pad(loss, (0, 3, 0, 2), value=math.nan)
    kept = torch.nn.functional.pad(mask, (0, 3, 0, 2))
    assert denominators(kept) == step
    assert float(aggregate(wide, kept, how, step, 10)) == pytest.approx(float(aggregate(loss, mask, how, step, 10)))


@pytest.mark.parametrize("how", AGGREGATES)
def test_nothing_trained_is_zero(how):
    empty = torch.zeros(2, 0)
    assert float(aggregate(empty, empty, how, denominators(empty), 10)) == 0


def test_ragged_masks_count_like_padded_ones():
    flat, offsets = np.array([1, 0, 1, 0, 0, 1], np.uint8), np.array([0, 2, 2, 3, 5, 6])
    assert denominators(flat, offsets) == Denominators(tokens=3, sequences=3)


def test_ranks_add_up():
    assert denominators(mask) + denominators(mask[:1]) == Denominators(10, 3)


def test_a_constant_length_is_needed():
    with pytest.raises(ValueError, match="needs a length"):
        aggregate(loss, mask, "seq-mean-token-sum-norm", denominators(mask))
