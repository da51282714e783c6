"""What is under way: nothing skipped, nothing twice, through losses, requeues and a resumed run."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncflow.data.draws import Draws
from asyncflow.data.order import Order
from asyncflow.errors import CheckpointError

SIZE = 10


def draws():
    return Draws(Order(SIZE, seed=3))


def resumed(old):
    """Return draws that go on from the position of others, by way of a file."""
    record = json.loads(json.dumps({**old.state(), "outstanding": old.outstanding}))
    new = draws()
    new.restore(record)
    return new


def test_groups_are_numbered_over_the_whole_run():
    own = draws()
    assert [draw.group for draw in own.take(3)] == [0, 1, 2]
    own.train([0, 1, 2])
    assert [draw.group for draw in resumed(own).take(2)] == [3, 4]


def test_a_requeued_prompt_comes_next_under_a_new_number():
    own = draws()
    first = own.take(2)
    own.requeue([0])
    again, fresh = own.take(2)
    assert (again.group, again.prompt, again.requeued) == (2, first[0].prompt, 1)
    assert (fresh.group, fresh.requeued) == (3, 0)


def test_a_lost_group_is_drawn_again_if_the_step_it_was_lost_in_was_not_trained():
    own = draws()
    first = own.take(3)
    own.lose([1])
    own.train([])
    assert resumed(own).take(3) == first
    own.train([0, 2])
    assert resumed(own).outstanding == ()


def test_a_checkpoint_of_other_data_is_refused():
    own = draws()
    own.take(3)
    record = {**own.state(), "outstanding": [[0, 10**6, 0]]}
    with pytest.raises(CheckpointError, match="goes on with prompt 1000000, and there are"):
        draws().restore(record)


@pytest.mark.parametrize("record", [{}, {"order": {}, "admitted": 1, "outstanding": []}, {"outstanding": [[1]]}])
def test_a_checkpoint_without_a_position_is_refused(record):
    with pytest.raises(CheckpointError):
        draws().restore(record)


@given(st.lists(st.tuples(st.sampled_from(["take", "train", "requeue", "resume"]), st.integers(0, 30)), max_size=40))
def test_each_prompt_of_an_epoch_is_trained_once_before_the_next_begins(moves):
    own, waiting, trained = draws(), {}, []
    for move, number in moves:
        chosen = list(waiting)[number % len(waiting)] if waiting else None
        if move == "take":
            waiting.update((draw.group, draw) for draw in own.take(1 + number % 4))
        elif move == "resume":
            own, waiting = resumed(own), {}
        elif move == "train" and waiting:
            trained.append(waiting.pop(chosen).prompt)
            own.train([chosen])
        elif move == "requeue" and waiting:
            del waiting[chosen]
            own.requeue([chosen])
    while own.outstanding:
        for draw in (*waiting.values(), *own.take(len(own.outstanding) - len(waiting))):
            trained.append(draw.prompt)
            own.train([draw.group])
        waiting = {}
    counts = [trained.count(prompt) for prompt in range(SIZE)]
    assert max(counts) - min(counts) <= 1
