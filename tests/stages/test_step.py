"""What is said of a step's rows, against numbers by hand."""

import pytest

from asyncflow.stages.step import Trained, describe

FIRST = Trained(
    groups=[0, 0], rewards=[1.0, 0.0], outcomes=["ok", "timeout"], signals=[True, True], prompts=[3, 3],
    responses=[2, 6], ages=[0, 2], waited=[0, 1], tokens=8, sequences=2, stale_lengths=[7], stale_tokens=4,
)  # fmt: skip
SECOND = Trained(
    groups=[1], rewards=[2.0], outcomes=["ok"], signals=[False], prompts=[5], responses=[4], ages=[1], waited=[1],
    tokens=4, sequences=1, stale_lengths=[9, 2], stale_tokens=1,
)  # fmt: skip


def test_rows_of_all_ranks_are_counted_as_one_step():
    found = describe([FIRST, SECOND], stale=True)
    assert found == {
        "reward_mean": 1.0, "reward_std": pytest.approx((2 / 3) ** 0.5), "advantage_zero_share": pytest.approx(1 / 3),
        "response_tokens_mean": 4.0, "response_tokens_max": 6.0, "rows": 3.0, "tokens": 23.0,
        "staleness_min": 0.0, "staleness_mean": 1.0, "staleness_max": 2.0, "staleness_histogram": [1, 1, 1],
        "staleness_in_flight_mean": pytest.approx(1 / 3), "staleness_in_flight_max": 1.0,
        "staleness_in_queue_mean": pytest.approx(2 / 3), "staleness_in_queue_max": 1.0,
        "reward_timeout": 1.0, "reward_error": 0.0, "reward_unscored": 0.0,
        "stale_rows": 3.0, "stale_tokens": 5.0, "stale_response_tokens_mean": 6.0,
    }  # fmt: skip


def test_where_nothing_can_be_stale_nothing_is_said_of_it_and_a_rank_may_have_no_rows():
    found = describe([SECOND, Trained()], stale=False)
    assert not any(name.startswith("stale_") for name in found)
    assert (found["rows"], found["reward_mean"]) == (1.0, 2.0)
    assert describe([SECOND, Trained()], stale=True)["stale_rows"] == 2.0
