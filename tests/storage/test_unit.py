import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncflow.storage import Batch
from asyncflow.storage.unit import Unit


def batch(start, count):
    return Batch({"x": np.arange(start, start + count), "l": [np.full(i % 4, i) for i in range(start, start + count)]})


def unit_of(*sizes):
    unit, start = Unit(["x", "l", "y"]), 0
    for size in sizes:
        unit.admit(size)
        unit.put(np.arange(start, start + size), batch(start, size))
        start += size
    return unit


def test_consecutive_rows_of_a_block_are_a_view():
    unit = unit_of(4)
    first, second = unit.gather(np.array([1, 2]), ["l"]), unit.gather(np.array([0, 1, 2]), ["l"])
    assert np.shares_memory(first["l"].values, second["l"].values)


def test_cells_that_were_found_are_gathered_after_their_rows_have_gone():
    unit = unit_of(4, 6)
    cells = unit.locate(np.array([8, 1, 9, 2]), ["l", "x"])
    unit.free(np.arange(10))
    unit.forget(10)
    assert unit.nbytes == 0
    assert cells.gather().equals(batch(0, 10).take([8, 1, 9, 2]).select(["l", "x"]))


def test_columns_are_added_beside_what_is_there():
    unit = unit_of(3)
    unit.widen(["z"])
    unit.admit(1)
    unit.put(np.array([1, 3]), Batch({"z": np.array([7, 8])}))
    assert unit.gather(np.array([3, 1]), ["z"])["z"].array.tolist() == [8, 7]
    assert unit.gather(np.arange(3), ["x", "l"]).equals(batch(0, 3))


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 5), min_size=1, max_size=5), st.data())
def test_rows_come_in_any_order_also_after_others_have_gone(sizes, data):
    total = sum(sizes)
    unit, reference = unit_of(*sizes), batch(0, total)
    gone = data.draw(st.lists(st.integers(0, total - 1), unique=True))
    for row in gone:
        unit.free(np.array([row]))
    left = sorted(set(range(total)) - set(gone))
    if left:
        rows = np.array(data.draw(st.lists(st.sampled_from(left), min_size=1, max_size=12)))
        assert unit.gather(rows, ["l", "x"]).equals(reference.take(rows).select(["l", "x"]))
        assert unit.nbytes <= 4 * reference.nbytes
    else:
        assert unit.nbytes == 0


def test_a_block_is_written_anew_when_most_of_it_is_dead():
    unit = unit_of(256)
    before = unit.nbytes
    unit.free(np.arange(254))
    assert unit.nbytes < before / 50
    assert unit.gather(np.array([254, 255]), ["x", "l"]).equals(batch(254, 2))


def test_rows_may_share_a_place():
    unit = Unit(["x"])
    unit.admit(6)
    unit.put(np.arange(6), Batch({"x": np.array([10, 20])}), np.repeat([0, 1], 3))
    assert unit.nbytes == 16
    assert unit.gather(np.array([5, 0, 2]), ["x"])["x"].array.tolist() == [20, 10, 10]
    unit.free(np.array([0, 1, 3, 4]))
    assert unit.nbytes == 16
    unit.free(np.array([2]))
    assert unit.gather(np.array([5]), ["x"])["x"].array.tolist() == [20]
