import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncflow.storage.rolling import Rolling
from asyncflow.storage.sampler import Order

PARTS = st.permutations(range(40)).map(lambda ids: [ids[start : start + 7] for start in range(0, 40, 7)])


@settings(max_examples=60, deadline=None)
@given(PARTS, st.lists(st.integers(1, 6), min_size=6, max_size=6), st.sets(st.integers(0, 39)))
def test_the_smallest_valid_ids_come_first_whatever_their_order_of_arrival(parts, counts, invalid):
    order, valid, waiting = Order(0), Rolling(np.bool_), set()
    valid.grow(40)
    order.reach(40)
    valid.put(np.array(sorted(set(range(40)) - invalid), np.int64), 1)
    for part, count in zip(parts, counts, strict=True):
        order.push(np.array(part))
        order.push(np.array(part[:2]))
        waiting |= set(part) - invalid
        expected = sorted(waiting)[:count]
        assert order.take(count, valid).tolist() == expected
        waiting -= set(expected)


def test_many_late_ids_are_merged():
    order, valid = Order(0), Rolling(np.bool_, fill=1)
    valid.grow(10_000)
    order.reach(10_000)
    order.push(np.arange(5000, 10_000))
    for start in range(4500, -1, -500):
        order.push(np.arange(start, start + 500))
    assert order.take(10_000, valid).tolist() == list(range(10_000))
