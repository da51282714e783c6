import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncflow.errors import WeightsError
from asyncflow.weights.shelf import Shelf


@given(st.integers(1, 6), st.lists(st.tuples(st.integers(1, 3), st.integers(0, 20)), max_size=20))
def test_the_newest_are_held_and_each_is_let_go_once(keep, steps):
    dropped, version, floor = [], 0, 0
    shelf = Shelf(keep, dropped.append)
    published = []
    for grown, retired in steps:
        version += grown
        shelf.begin(version)
        assert len(published) - len(dropped) < keep, "there is room before there is another"
        shelf.put(version, version)
        published.append(version)
        floor = max(floor, min(retired, version))
        shelf.retire(min(retired, version))
        held = [each for each in published if shelf.get(each) is not None]
        assert held == [each for each in published[-keep:] if each >= floor]
        assert version in held
    shelf.close()
    assert sorted(dropped) == published


def test_what_is_put_after_the_end_is_let_go():
    dropped = []
    shelf = Shelf(2, dropped.append)
    shelf.begin(1)
    shelf.close()
    shelf.put(1, "late")
    assert dropped == ["late"]
    with pytest.raises(WeightsError, match="closed"):
        shelf.begin(2)
