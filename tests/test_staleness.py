import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncflow.errors import StalenessExceeded
from asyncflow.staleness import StalenessController, check, staleness
from asyncflow.storage.batch import Column


def ragged(rows: list[list[int]], dtype: str) -> Column:
    return Column.of(f"list<{dtype}>", [np.array(row, dtype=dtype) for row in rows])


def test_a_bound_of_zero_admits_one_step_at_version_zero():
    control = StalenessController(groups_per_step=4, steps=3)
    assert control.room() == 4
    control.admit(4)
    assert control.room() == 0
    control.trained(1)
    assert control.room() == 4


def test_no_more_is_admitted_than_the_run_needs():
    control = StalenessController(groups_per_step=4, steps=2, bound=5)
    assert control.room() == 8
    control.admit(8)
    control.trained(1)
    assert control.room() == 0


def test_lost_groups_are_replaced():
    control = StalenessController(groups_per_step=4, steps=1)
    control.admit(4)
    control.give_back(2)
    assert control.room() == 2


def test_admitting_more_than_there_is_room_for_is_refused():
    control = StalenessController(groups_per_step=4, steps=1)
    with pytest.raises(StalenessExceeded, match="5 groups were to be admitted, but there is room for 4"):
        control.admit(5)


def test_admission_counts_from_the_version_that_a_resumed_run_starts_with():
    control = StalenessController(groups_per_step=2, steps=10, bound=1, first=700)
    assert control.room() == 4


@given(
    bound=st.integers(0, 3),
    first=st.integers(0, 1000),
    actions=st.lists(st.sampled_from(["admit", "train", "lose"]), max_size=60),
)
def test_no_schedule_admits_beyond_the_bound_and_none_deadlocks(bound, first, actions):
    per_step, steps = 3, 8
    control = StalenessController(per_step, steps, bound, first)
    waiting, trained = 0, 0
    for action in actions:
        if action == "admit":
            waiting += control.room()
            control.admit(control.room())
        elif action == "lose" and waiting:
            waiting -= 1
            control.give_back(1)
        elif action == "train" and waiting >= per_step:
            waiting, trained = waiting - per_step, trained + 1
            control.trained(first + trained)
        assert waiting <= (bound + 1) * per_step
        assert waiting + control.room() >= per_step or trained == steps


def test_only_trained_tokens_count():
    versions = ragged([[3, 1, 5], [4, 4], []], "int32")
    mask = ragged([[1, 0, 1], [1, 1], []], "uint8")
    assert staleness(versions, mask, 5).tolist() == [2, 1, 0]


def test_placeholders_under_the_mask_cannot_become_the_minimum():
    assert staleness(ragged([[-1, 7]], "int32"), ragged([[0, 1]], "uint8"), 7).tolist() == [0]


def test_exactly_the_bound_is_allowed_and_one_more_is_not():
    check(np.array([10, 11]), np.array([0, 2]), bound=2)
    with pytest.raises(StalenessExceeded, match="row 11 is 3 versions old and max_staleness is 2"):
        check(np.array([10, 11]), np.array([0, 3]), bound=2)
