"""What the stage refuses; the estimators have tests of their own."""

import numpy as np
import pytest

from asyncflow.config.model import Data, Model, Pipeline, Reward, Rollout
from asyncflow.config.training import Train
from asyncflow.errors import PipelineError, RewardError
from asyncflow.stage import Context
from asyncflow.stages.advantage import Advantage
from asyncflow.storage import Batch
from asyncflow.storage.batch import Column

BOUNDS = np.array([0, 2, 6, 6])
"""Responses of 2, 4 and 0 tokens."""


def ragged(*values):
    return Column.ragged(np.array(values, np.float32), BOUNDS, "list<float32>")


def answer(columns, tmp_path, tokens=8, **train):
    """Let the stage answer one group of rows."""
    config = Pipeline(
        model=Model(path="."),
        data=Data(source="python"),
        reward=Reward(fn="exact_match"),
        rollout=Rollout(max_response_tokens=tokens),
        train=Train(**train),
    )
    stage = Advantage()
    stage.setup(Context(config, "trainer-0", tmp_path, lambda event: None))
    count = len(next(iter(columns.values())))
    rows = np.arange(10, 10 + count)
    return list(stage.process(Batch({"group_id": np.zeros(count, np.int64), **columns, "row": rows})))


def advantages(rewards, tmp_path, **train):
    (part,) = answer({train.get("reward", "reward"): np.array(rewards)}, tmp_path, **train)
    return part.columns


def tokens(rewards, tmp_path, mask=(1, 1, 1, 1, 0, 1), longest=8, **train):
    """Advantages of the three responses, with all that the stage may read beside the reward."""
    found = {
        "reward": np.array(rewards, float),
        "response_mask": Column.ragged(np.array(mask, np.uint8), BOUNDS, "list<uint8>"),
        "rollout_logprobs": ragged(-1, -1, -1, -1, -1, -1),
        "ref_logprobs": ragged(-2, -2, -1, -1, 99, -1),
        "teacher_logprobs": ragged(-0.5, -1, -1, -3, 99, -1),
        "values": ragged(0.5, 0.5, 0, 0, 99, 0),
    }
    (part,) = answer(found, tmp_path, tokens=longest, **train)
    return part.columns


def test_better_than_the_group_is_above_zero_and_the_column_may_be_of_another_name(tmp_path):
    assert np.sign(advantages([0.0, 1.0], tmp_path)["advantage"].array).tolist() == [-1, 1]
    assert np.sign(advantages([1, 0], tmp_path, reward="shaped")["advantage"].array).tolist() == [1, -1]


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), float("-inf")])
def test_what_is_no_finite_number_is_told_with_its_column_and_row(tmp_path, wrong):
    with pytest.raises(RewardError, match=f"column shaped of row 11 is {wrong}, and of 1 others"):
        advantages([0.0, wrong, wrong], tmp_path, reward="shaped")


def test_groups_without_a_signal_leave_by_the_reward_and_not_by_its_shaped_form(tmp_path):
    mask = Column.ragged(np.ones(6, np.uint8), BOUNDS, "list<uint8>")
    columns = {"reward": np.ones(3), "response_mask": mask}
    (drop,) = answer(columns, tmp_path, tokens=4, algorithm="dapo", overlong=0.5)
    assert (drop.positions.tolist(), drop.reason) == ([0, 1, 2], "no_signal")
    other = {"reward": np.array([0.0, 1.0, 2.0, 2.0]), "group_id": np.array([0, 0, 1, 1])}
    drop, part = answer(other, tmp_path, dynamic_sampling=1)
    assert (drop.positions.tolist(), part.positions.tolist()) == ([2, 3], [0, 1])
    assert np.sign(part.columns["advantage"].array).tolist() == [-1, 1]


def test_a_response_that_runs_into_its_last_tokens_loses_reward(tmp_path):
    # Of 4 tokens the last 2 cost: responses of 2, 4 and 0 tokens lose 0, 1 and 0.
    found = tokens([1, 1, 1], tmp_path, longest=4, algorithm="dr_grpo", overlong=0.5)["advantage"].array
    assert found == pytest.approx([1 / 3, -2 / 3, 1 / 3])


def test_the_distance_from_the_reference_is_taken_off_the_reward(tmp_path):
    # k1 is 1 for both tokens of the first response, and 0 elsewhere.
    chosen = {"kl_coef": 0.5, "kl": "k1", "kl_in": "reward"}
    whole = tokens([1, 1, 1], tmp_path, algorithm="dr_grpo", **chosen)["advantage"].array
    assert whole == pytest.approx([-2 / 3, 1 / 3, 1 / 3])
    each = tokens([1, 1, 1], tmp_path, algorithm="reinforce++", **chosen)["advantage"]
    assert each.values.tolist() == pytest.approx([0, 0.5, 1, 1, 0, 1])
    assert each.lengths.tolist() == [2, 4, 0]


def test_a_teacher_adds_to_each_trained_token(tmp_path):
    alone = tokens([5, 0, 0], tmp_path, algorithm="opd", distill_coef=2.0)["advantage"]
    assert alone.values.tolist() == pytest.approx([1, 0, 0, -4, 0, 0])
    added = tokens([2, 0, 1], tmp_path, algorithm="dr_grpo", distill_coef=2.0)["advantage"]
    assert added.values.tolist() == pytest.approx([2, 1, -1, -5, 0, -1])


def test_a_critic_gives_advantages_and_what_its_values_should_have_been(tmp_path):
    found = tokens([1, 2, 0], tmp_path, algorithm="ppo", gae_lambda=1.0, gamma=1.0)
    assert found["returns"].values.tolist() == pytest.approx([1, 1, 2, 2, 0, 2])
    assert found["advantage"].values.tolist() == pytest.approx([0.5, 0.5, 2, 2, 0, 2])


OWN = """
import torch

def half(rewards, groups):
    return (rewards - rewards.mean()) / 2

def short(rewards, groups):
    return rewards[:1]

def nothing(rewards, groups):
    return rewards * torch.nan
"""


def test_an_advantage_of_the_users_own_is_taken_if_it_gives_a_number_for_each(tmp_path):
    (tmp_path / "own.py").write_text(OWN)
    assert advantages([0.0, 1.0], tmp_path, advantage=f"{tmp_path}/own.py:half")["advantage"].array.tolist() == [
        -0.25,
        0.25,
    ]
    for name in ("short", "nothing"):
        with pytest.raises(PipelineError, match=f"own.py:{name} returned .* for 2 rewards"):
            advantages([0.0, 1.0], tmp_path, advantage=f"{tmp_path}/own.py:{name}")
