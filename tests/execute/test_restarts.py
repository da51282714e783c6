from threading import Thread

import pytest

from asyncflow.errors import DataError, LeaseLost, PipelineError, RewardError, WaitTimeout, WeightsError
from asyncflow.execute.restarts import FORGIVEN, Restarts, final, restartable
from asyncflow.pipeline import StageSpec


def test_a_replica_begins_again_as_often_in_a_row_as_is_allowed():
    own = Restarts(2)
    assert [own.fail("a") for _ in range(4)] == [1, 2, 0, 0]
    assert own.fail("b") == 1
    assert own.counts == {"a": 2, "b": 1}


def test_none_begins_again_where_none_may():
    own = Restarts(0)
    assert own.fail("a") == 0
    assert not own.counts


@pytest.mark.parametrize(("batches", "expected"), [(FORGIVEN - 1, 2), (FORGIVEN, 1)])
def test_failures_are_forgiven_after_some_batches_in_one_life(batches, expected):
    own = Restarts(3)
    own.fail("a")
    threads = [Thread(target=own.work, args=("a",)) for _ in range(batches)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert own.fail("a") == expected


def test_batches_of_a_life_before_forgive_nothing():
    own = Restarts(3)
    for _ in range(FORGIVEN - 1):
        own.work("a")
    assert own.fail("a") == 1
    own.work("a")
    assert own.fail("a") == 2


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (PipelineError("columns"), True),
        (RewardError("policy"), True),
        (DataError("row"), True),
        (WaitTimeout("rows"), True),
        (WeightsError("retired"), False),
        (LeaseLost("late"), False),
        (MemoryError(), False),
        (KeyError("x"), False),
    ],
)
def test_errors_that_would_come_again_are_final(error, expected):
    assert final(error) is expected


def test_what_shares_the_process_of_the_trainer_does_not_begin_again():
    reward, advantage = StageSpec("reward", ("x",)), StageSpec("advantage", ("x",), host="trainer")
    assert restartable([reward])
    assert not restartable([advantage])
