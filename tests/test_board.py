import threading

import numpy as np
import pytest

from asyncflow.board import Board, Ended, Stopped
from asyncflow.errors import ReplicaFailed, WaitTimeout
from asyncflow.execute.messages import REQUEUED, Applied, Dropped, Evaluated, Failed, GaveUp, Published, Ready, Stepped


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
    own.take("a", Dropped("train", "reward", "timeout", (7, 8)))
    assert own.lost == 0
    own.take("a", Dropped("train", "reward", "timeout", (7,)))
    assert own.lost == 1
    own.take("a", Dropped("eval", "reward", "timeout", (8,)))
    assert own.lost == 1
    assert own.dropped == {"train": 3, "eval": 1}


def test_engines_are_behind_until_they_have_applied_a_version():
    own = board()
    own.take("b", Published(3, b""))
    assert own.behind(3) == ["a"]
    own.take("a", Applied(3))
    assert own.behind(3) == []


def test_steps_and_rewards_are_kept_apart_by_table():
    own = board()
    own.take("b", Stepped("warmup", 1, {}))
    own.take("b", Stepped("train", 2, {}))
    own.take("b", Evaluated(np.array([1.0, 0.0])))
    assert own.steps == {"warmup": 1, "train": 1}
    assert sum(map(len, own.rewards)) == 2


def test_what_has_kept_an_engine_from_a_version_is_told_with_its_name():
    own = Board(replicas=("a", "b", "c"), engines=("a", "b", "c"), group_size=2)
    own.take("a", Applied(3))
    own.take("b", GaveUp(3, "the trainer is gone"))
    own.take("c", GaveUp(2, "too slow"))
    assert own.late(3) == "b (the trainer is gone), c"
    assert own.times_given_up == 2


def test_how_groups_end_is_told_once():
    own = board()
    own.take("a", Dropped("train", "reward", "timeout", (7, 7)))
    own.take("b", Dropped("train", "train", REQUEUED, (8, 8)))
    own.take("b", Stepped("train", 1, {}, groups=(3, 4), rows=4))
    assert (own.lost, own.discarded, own.trained) == (1, 2, 4)
    assert own.take_ended() == Ended([7], [8], [3, 4])
    assert own.take_ended() == Ended()


def test_a_group_that_is_dropped_while_it_is_trained_was_trained():
    own = board()
    own.take("a", Dropped("train", "beside", "odd", (7, 7)))
    own.take("b", Stepped("train", 1, {}, groups=(7,), rows=2))
    assert (own.lost, own.take_ended()) == (0, Ended(trained=[7]))
