"""What the stage refuses; the estimators have tests of their own."""

import numpy as np
import pytest

from asyncflow.config.model import Data, Model, Pipeline, Reward
from asyncflow.config.training import Train
from asyncflow.errors import RewardError
from asyncflow.stage import Context
from asyncflow.stages.advantage import Advantage
from asyncflow.storage import Batch


def advantages(rewards, tmp_path, **train):
    config = Pipeline(
        model=Model(path="."), data=Data(source="python"), reward=Reward(fn="exact_match"), train=Train(**train)
    )
    stage = Advantage()
    stage.setup(Context(config, "trainer-0", tmp_path, lambda event: None))
    rows = np.arange(10, 10 + len(rewards))
    name = train.get("reward", "reward")
    (part,) = stage.process(Batch({name: np.array(rewards), "group_id": np.zeros(len(rewards), np.int64), "row": rows}))
    return part.columns


def test_better_than_the_group_is_above_zero_and_the_column_may_be_of_another_name(tmp_path):
    assert np.sign(advantages([0.0, 1.0], tmp_path)["advantage"].array).tolist() == [-1, 1]
    assert np.sign(advantages([1, 0], tmp_path, reward="shaped")["advantage"].array).tolist() == [1, -1]


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), float("-inf")])
def test_what_is_no_finite_number_is_told_with_its_column_and_row(tmp_path, wrong):
    with pytest.raises(RewardError, match=f"column shaped of row 11 is {wrong}, and of 1 others"):
        advantages([0.0, wrong, wrong], tmp_path, reward="shaped")
