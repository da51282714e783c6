import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncflow.board import Board, Ended, Stopped
from asyncflow.errors import ReplicaFailed, WaitTimeout
from asyncflow.execute.messages import (
    REQUEUED,
    Applied,
    Dropped,
    Evaluated,
    Failed,
    GaveUp,
    Published,
    Ready,
    Scored,
    Stepped,
    Trouble,
)


def board() -> Board:
    return Board(replicas=("a", "b"), engines=("a",), group_size=2)


def test_a_wait_ends_when_an_event_makes_its_condition_true():
    own = board()
    threading.Timer(0.01, own.take, ("a", Ready())).start()
    own.wait(lambda: "a" in own.ready, 30, lambda: "a")
    assert own.ready == {"a"}


def test_a_wait_ends_within_its_bound_and_says_for_what():
    with pytest.raises(WaitTimeout, match=r"waited 0\.01 s for the moon"):
        board().wait(lambda: False, 0.01, lambda: "the moon")


def test_the_first_failure_ends_every_wait_and_later_ones_do_not_hide_it():
    own = board()
    own.take("b", Failed("first"))
    own.take("a", Failed("second"))
    with pytest.raises(ReplicaFailed, match="replica b failed:\nfirst"):
        own.wait(lambda: True, 1, lambda: "nothing")


def test_stopping_ends_waits_but_those_of_the_stop_itself():
    own = board()
    own.stop()
    with pytest.raises(Stopped):
        own.wait(lambda: True, 1, lambda: "nothing")
    own.wait(lambda: True, 1, lambda: "nothing", stopping=True)


def test_a_group_is_lost_when_its_last_row_is():
    own = board()
    own.take("a", Dropped("train", "reward", "timeout", (7, 8), (70, 80)))
    assert own.lost == 0
    own.take("a", Dropped("train", "reward", "timeout", (7,), (71,)))
    assert own.lost == 1
    own.take("a", Dropped("eval", "reward", "timeout", (8,), (81,)))
    assert own.lost == 1
    assert own.dropped == 3
    assert own.reasons == {"timeout": 3}


def test_engines_are_behind_until_they_have_applied_a_version():
    own = board()
    own.take("b", Published(3, b""))
    assert own.behind(3) == ["a"]
    own.take("a", Applied(3))
    assert own.behind(3) == []


def test_steps_are_kept_apart_by_table():
    own = board()
    own.take("b", Stepped("warmup", 1, {}))
    own.take("b", Stepped("train", 2, {}))
    assert own.steps == {"warmup": 1, "train": 1}


def test_a_held_out_response_counts_as_it_was_told_first_however_often_it_comes():
    own = board()
    first, again, other = (Scored(row, reward, "ok", "x", (3,)) for row, reward in ((7, 1.0), (7, 0.0), (8, 0.5)))
    own.take("b", Evaluated((first,)))
    own.take("b", Evaluated((again, other)))
    assert own.held_out == {7: first, 8: other}


def test_an_error_beside_the_replicas_ends_every_wait_and_does_not_hide_the_first():
    own = board()
    own.fail(WaitTimeout("first"))
    own.fail(WaitTimeout("second"))
    own.take("b", Failed("third"))
    with pytest.raises(WaitTimeout, match="first"):
        own.wait(lambda: True, 1, lambda: "nothing")


def test_the_last_trouble_with_scoring_is_kept_and_what_it_cost_is_added_up():
    own = board()
    for trouble in (Trouble("first", 1, 0), Trouble("last", 0, 2), Trouble("", 3, 1)):
        own.take("a", trouble)
    assert own.trouble == Trouble("last", 4, 3)


def test_what_has_kept_an_engine_from_a_version_is_told_with_its_name():
    own = Board(replicas=("a", "b", "c"), engines=("a", "b", "c"), group_size=2)
    own.take("a", Applied(3))
    own.take("b", GaveUp(3, "the trainer is gone"))
    own.take("c", GaveUp(2, "too slow"))
    assert own.late(3) == "b (the trainer is gone), c"
    assert own.times_given_up == 2


def test_how_groups_end_is_told_once():
    own = board()
    own.take("a", Dropped("train", "reward", "timeout", (7, 7), (70, 71)))
    own.take("b", Dropped("train", "train", REQUEUED, (8, 8), (80, 81)))
    own.take("b", Stepped("train", 1, {}, groups=(3, 4), rows=4))
    assert (own.lost, own.trained) == (1, 4)
    assert own.take_ended() == Ended([7], [8], [3, 4])
    assert own.take_ended() == Ended()


def test_a_group_that_is_dropped_while_it_is_trained_was_trained():
    own = board()
    own.take("a", Dropped("train", "beside", "odd", (7, 7), (70, 71)))
    own.take("b", Stepped("train", 1, {}, groups=(7,), rows=2))
    assert (own.lost, own.take_ended()) == (0, Ended(trained=[7]))


def test_time_in_which_a_replica_begins_again_does_not_count():
    own = board()
    own.take("a", Ready())
    own.fall("a")
    assert (own.ready, own.away) == (set(), {"a"})
    threading.Timer(0.2, own.take, ("a", Ready())).start()
    own.wait(lambda: "a" in own.ready, 0.01, lambda: "a")
    assert own.away == set()
    with pytest.raises(WaitTimeout):
        own.wait(lambda: False, 0.01, lambda: "the moon")


def test_an_engine_that_begins_again_is_behind_until_it_has_the_weights_again():
    own = board()
    own.take("a", Applied(3))
    own.fall("a")
    assert own.behind(3) == ["a"]


def test_what_a_run_still_does_when_it_has_failed_waits_on():
    own = board()
    own.take("b", Failed("first"))
    own.wait(lambda: True, 1, lambda: "nothing", failing=True)
    assert own.failed == {"b"}


@given(st.permutations(["tell 70", "tell 71", "settle none", "settle 71"]))
def test_a_group_is_lost_once_whoever_tells_of_its_rows_in_whichever_order(order):
    own = board()
    own.admit({7: (70, 71), 8: (80, 81)})
    for what in order:
        verb, number = what.split()
        if verb == "tell":
            own.take("a", Dropped("train", "reward", "timeout", (7,), (int(number),)))
        else:
            own.settle((7, 8), (80, 81, 71) if number == "71" else (80, 81))
    assert (own.dropped, own.lost, own.take_ended()) == (2, 1, Ended([7]))
    assert own.under_way() == (8,)


def test_a_group_that_was_trained_is_not_lost_when_its_rows_are_gone():
    own = board()
    own.admit({7: (70, 71)})
    groups = own.under_way()
    own.take("b", Stepped("train", 1, {}, groups=(7,), rows=2))
    own.settle(groups, ())
    assert (own.lost, own.dropped) == (0, 0)
