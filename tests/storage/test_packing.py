"""The division over ranks and micro-batches, against the exact optimum where that can be found."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncflow.storage.packing import plan

WEIGHTS = st.lists(st.integers(0, 4000), min_size=1, max_size=40).map(lambda each: np.array(each, np.int64))


def long_tailed(seed, count):
    lengths = np.exp(np.random.default_rng(seed).normal(6.5, 1.0, count))
    return np.minimum(lengths, 16_384).astype(np.int64)


def sums(weights, ranks, budget):
    bins, count = plan(weights, ranks, budget)
    return np.bincount(bins // count, weights, minlength=ranks), np.bincount(bins, weights, minlength=ranks * count)


@settings(max_examples=150, deadline=None)
@given(WEIGHTS, st.integers(1, 5), st.integers(1, 6000))
def test_no_micro_batch_exceeds_the_budget_unless_it_is_one_item(weights, ranks, budget):
    bins, count = plan(weights, ranks, budget)
    assert bins.shape == weights.shape
    assert 0 <= bins.min() <= bins.max() < ranks * count
    loads = np.bincount(bins, np.maximum(weights, 1), minlength=ranks * count)
    items = np.bincount(bins, minlength=ranks * count)
    assert np.all((loads <= budget) | (items == 1))
    by_rank = loads.reshape(ranks, count)
    assert np.all(np.diff(by_rank) <= 0), "the largest micro-batch of a rank comes first"


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("count", "ranks"), [(256, 8), (512, 16), (128, 4), (2048, 32)])
def test_long_tailed_lengths_are_balanced(seed, count, ranks):
    weights = long_tailed(seed, count)
    loads, _ = sums(weights, ranks, 16_384)
    assert loads.max() <= 1.05 * loads.mean()
    in_turn = np.bincount(np.arange(count) % ranks, weights)
    assert loads.max() - loads.min() < (in_turn.max() - in_turn.min()) / 10


@pytest.mark.parametrize("seed", range(12))
def test_small_cases_are_near_the_optimum(seed):
    random = np.random.default_rng(seed)
    count, ranks = int(random.integers(2, 9)), int(random.integers(2, 4))
    weights = long_tailed(seed, count)
    best = min(np.bincount(each, weights, minlength=ranks).max() for each in product(range(ranks), repeat=count))
    loads, _ = sums(weights, ranks, 10**9)
    assert loads.max() <= 1.05 * best


@pytest.mark.parametrize("seed", range(12))
def test_few_micro_batches_are_made(seed):
    random = np.random.default_rng(100 + seed)
    weights = random.integers(1, 100, int(random.integers(2, 8)))
    budget = int(random.integers(100, 200))
    _, count = plan(weights, 1, budget)
    cases = (np.bincount(each, weights) for each in product(range(len(weights)), repeat=len(weights)))
    best = min(np.count_nonzero(loads) for loads in cases if loads.max() <= budget) if len(weights) < 7 else count
    assert count <= best + 1


def test_where_items_do_not_suffice_micro_batches_are_empty():
    loads, each = sums(np.array([50, 60, 70]), 2, 70)
    assert sorted(loads) == [70, 110]
    assert sorted(each) == [0, 50, 60, 70]


def test_an_item_above_the_budget_stands_alone_and_its_rank_gets_less():
    loads, each = sums(np.array([5000, *[100] * 90]), 2, 1000)
    assert loads.tolist() == [7000, 7000]
    assert each.max() == 5000
