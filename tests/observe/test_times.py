import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncflow.execute.messages import Worked
from asyncflow.observe.times import Cover, Spent, Stopwatch, Times, pieces


def worked(replica: str, started: float, leased: float, ended: float, waits=(), table="train", **more) -> Worked:
    blocked = more.get("blocked", sum(end - began for began, end in waits))
    busy = ended - leased - blocked
    stage = replica.rpartition("-")[0]
    return Worked(table, stage, replica, 8, busy, leased - started, blocked, started=started, waits=waits)


def times(*batches: Worked) -> Times:
    stopwatch = Stopwatch()
    for batch in batches:
        stopwatch.add(batch)
    return stopwatch.times()


def test_time_counts_from_the_first_rows_to_the_last_for_everybody():
    found = times(worked("rollout-0", 0, 100, 104), worked("reward-0", 0, 104, 106), worked("train-0", 0, 106, 110))
    assert found.per_second() == {
        "rollout": {"rollout-0": {"busy": 400, "idle": 600, "blocked": 0}},
        "reward": {"reward-0": {"busy": 200, "idle": 800, "blocked": 0}},
        "train": {"train-0": {"busy": 400, "idle": 600, "blocked": 0}},
    }


def test_a_replica_is_busy_while_any_of_its_batches_is_worked_on_and_blocked_while_all_of_them_wait():
    found = times(
        worked("rollout-0", 0, 0, 4, waits=((2, 4),)), worked("rollout-0", 0, 1, 5, waits=((3, 5),)),
        worked("train-0", 0, 5, 10),
    )  # fmt: skip
    assert found.per_second()["rollout"] == {"rollout-0": {"busy": 300, "idle": 500, "blocked": 200}}


def test_waits_that_are_not_told_one_by_one_count_too():
    found = times(worked("reward-0", 0, 0, 10, waits=((2, 4),), blocked=5))
    assert found.per_second()["reward"] == {"reward-0": {"busy": 500, "idle": 0, "blocked": 500}}


def test_other_tables_do_not_count():
    assert times(worked("reward-0", 0, 1, 2, table="eval")).stages == {}
    assert times().bottleneck is None


def test_a_stage_is_shown_by_its_worst_replica_and_the_busiest_one_is_the_bottleneck():
    found = times(worked("rollout-0", 0, 0, 1), worked("rollout-1", 0, 1, 10), worked("train-0", 0, 2, 8))
    assert found.worst("rollout")[0] == "rollout-1"
    assert found.rows("rollout") == 16
    assert found.bottleneck == "rollout"


def test_times_of_two_parts_add_up_and_can_be_taken_away_again():
    one, other = times(worked("train-0", 0, 0, 4)), times(worked("train-0", 0, 2, 3), worked("reward-0", 0, 0, 4))
    both = one.plus(other)
    assert both.stages["train"]["train-0"] == Spent(16, 5.0, 3.0, 0.0)
    assert both.plus(other, -1).stages["train"] == one.stages["train"]


@given(st.floats(0, 1e6), st.floats(0, 1e6), st.floats(0, 1e6))
def test_the_milliseconds_of_a_second_are_a_thousand(busy, idle, blocked):
    found = Spent(1, busy, idle, blocked).per_second()
    assert sum(found.values()) == 1000
    assert min(found.values()) >= 0


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 10))))
def test_what_intervals_cover_counts_once(intervals):
    cover, covered = Cover(), set()
    for began, length in intervals:
        cover.add(began, began + length)
        covered |= set(range(began, began + length))
    assert cover.seconds == pytest.approx(len(covered))


def test_the_pieces_of_a_batch_lie_between_its_waits():
    batch = worked("reward-0", 0, 1, 9, waits=((1, 2), (4, 5), (8, 9)))
    assert list(pieces(batch)) == [(2, 4), (5, 8)]
