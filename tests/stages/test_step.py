"""What is said of a step's rows, against numbers by hand."""

import numpy as np
import pytest

from asyncflow.stages.step import Share, Trained, describe
from asyncflow.storage import Batch
from asyncflow.storage.batch import Column

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


def distilled(mask, policy, teacher):
    ragged = {
        "response_mask": np.array(mask, np.uint8),
        "response_tokens": np.zeros(len(mask), np.int64),
        "prompt_tokens": np.zeros(len(mask), np.int64),
        "rollout_logprobs": np.array(policy, np.float32),
        "teacher_logprobs": np.array(teacher, np.float32),
    }
    bounds = np.array([0, len(mask)])
    columns = {name: Column.ragged(values, bounds, f"list<{values.dtype}>") for name, values in ragged.items()}
    scalars = {"row": np.array([0]), "group_id": np.array([0]), "reward": np.array([0.0]), "advantage": np.array([1.0])}
    return Batch({**columns, **scalars, "reward_outcome": ["ok"]})


def test_the_distance_from_the_teacher_is_the_mean_over_the_trained_tokens_of_all_ranks():
    one, other, idle = Share(), Share(), Share()
    age = np.zeros(1, np.int64)
    one.take(distilled([1, 0, 1], [-1.0, np.nan, -2.0], [-1.5, -9.0, -4.0]), age, age)
    one.take(distilled([0, 1], [5.0, -1.0], [np.inf, -0.5]), age, age)
    other.take(distilled([1], [-3.0], [-1.0]), age, age)
    said = [share.said({}) for share in (one, other, idle)]
    assert describe(said, stale=False)["teacher_kl"] == pytest.approx((0.5 + 2 - 0.5 - 2) / 4)
    assert describe(said[:1], stale=False)["teacher_kl"] == pytest.approx((0.5 + 2 - 0.5) / 3)
