import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from asyncflow.backends.train.cut import cut
from tests.backends.tiny import batch

PAIRS = st.lists(st.tuples(st.integers(1, 9), st.integers(0, 9)), min_size=1, max_size=30)


def rows(pairs):
    prompts, responses = ([np.ones(size, np.int64) for size in sizes] for sizes in zip(*pairs, strict=True))
    mask = [np.ones(len(response), np.uint8) for response in responses]
    return batch(len(pairs), prompt_tokens=prompts, response_tokens=responses, response_mask=mask)


def parts(pairs, budget, ids=None, *, packed=True):
    count, made = cut(rows(pairs), budget, [], ids, pad=0, device=torch.device("cpu"), packed=packed)
    found = list(made)
    assert len(found) == count
    return found


@given(PAIRS, st.integers(18, 60))
def test_real_tokens_count_when_packed_and_no_row_is_lost(pairs, budget):
    found = parts(pairs, budget)
    assert all(int(part.attention.sum()) <= budget for part in found)
    assert sorted(row for part in found for row in part.rows.tolist()) == list(range(len(pairs)))


@given(PAIRS, st.integers(18, 60))
def test_padding_counts_otherwise(pairs, budget):
    assert all(part.tokens.numel() <= budget for part in parts(pairs, budget, packed=False))


@given(PAIRS, st.integers(18, 60), st.randoms(use_true_random=False))
def test_the_order_of_arrival_does_not_count(pairs, budget, random):
    order = list(range(len(pairs)))
    random.shuffle(order)
    found = parts(pairs, budget, np.arange(len(pairs)))
    again = parts([pairs[row] for row in order], budget, np.array(order))
    assert [part.rows.tolist() for part in found] == [part.rows.tolist() for part in again]


def test_rows_of_very_different_lengths_share_a_micro_batch():
    pairs = [(1, 49), *[(1, 4)] * 10]
    assert len(parts(pairs, 100)) == 1
    assert len(parts(pairs, 100, packed=False)) > 1


def test_packed_micro_batches_are_of_about_one_size():
    sizes = [int(part.attention.sum()) for part in parts([(1, size) for size in range(20)], 100)]
    assert sum(sizes) == 210
    assert len(sizes) == 3
    assert max(sizes) - min(sizes) <= 20


@pytest.mark.parametrize("size", [5, 6, 10])
def test_rows_that_fill_half_a_budget_or_more_find_room(size):
    assert len(parts([(size, 0)] * 9, 10)) == {5: 5, 6: 9, 10: 9}[size]
