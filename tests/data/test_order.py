import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncflow.data.order import Order
from asyncflow.errors import CheckpointError, DataError

sizes = st.integers(1, 12)
counts = st.lists(st.integers(1, 30), min_size=1, max_size=6)


@settings(deadline=None, max_examples=30)
@given(sizes, st.integers(0, 2**31 - 1), st.booleans(), counts)
def test_every_epoch_has_each_index_once_whatever_the_draws(size, seed, shuffle, draws):
    order = Order(size, seed, shuffle)
    drawn = [order.take(count) for count in draws]
    assert [len(part) for part in drawn] == draws
    whole = np.concatenate(drawn)
    assert whole.dtype == np.int64
    assert (whole == Order(size, seed, shuffle).take(len(whole))).all()
    for start in range(0, len(whole) - size + 1, size):
        assert sorted(whole[start : start + size]) == list(range(size))
    assert order.epoch == len(whole) // size


@settings(deadline=None, max_examples=30)
@given(sizes, st.integers(0, 5), counts, st.integers(1, 30))
def test_a_restored_order_goes_on_exactly_there(size, seed, draws, more):
    order = Order(size, seed)
    for count in draws:
        order.take(count)
    again = Order(size, seed)
    again.restore(order.state())
    assert (again.take(more) == order.take(more)).all()
    assert again.state() == order.state()


def test_epochs_and_seeds_differ_and_no_shuffle_is_the_order_of_the_source():
    order = Order(50, 1)
    first, second = order.take(50), order.take(50)
    assert first.tolist() != second.tolist()
    assert first.tolist() != Order(50, 2).take(50).tolist()
    assert Order(3, 0, shuffle=False).take(7).tolist() == [0, 1, 2, 0, 1, 2, 0]


@pytest.mark.parametrize("other", [Order(4, 0), Order(5, 1), Order(5, 0, shuffle=False)])
def test_the_state_of_another_order_is_refused(other):
    with pytest.raises(CheckpointError, match="prompts cannot be drawn on from this checkpoint: "):
        other.restore(Order(5, 0).state())


def test_no_prompts_is_an_error():
    with pytest.raises(DataError, match="no prompts"):
        Order(0, 0)
