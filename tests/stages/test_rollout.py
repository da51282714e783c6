"""An engine whose new weights do not come keeps the ones that it has, says so, and goes on."""

import numpy as np
import pytest
import torch

from asyncflow.config.model import Data, Model, Pipeline, Reward, Train, Weights
from asyncflow.execute.messages import Applied, Apply, GaveUp, Stop
from asyncflow.stage import Context
from asyncflow.stages.rollout import Rollout
from asyncflow.storage import Batch
from asyncflow.weights import sender
from tests.backends.tiny import CONFIG, spec, weights


@pytest.fixture
def made(tmp_path):
    """A stage, the trainer's end, and the events of the stage."""
    config = Pipeline(
        model=Model(config=CONFIG, tokenizer="characters", characters="abcdefghijklmnop"),
        data=Data(source="python"),
        reward=Reward(fn="exact_match"),
        train=Train(group_size=2, prompts_per_step=2, token_budget=64),
        weights=Weights(channel="shm", timeout=5.0),
    )
    events, stage, own = [], Rollout(), sender(config, tmp_path)
    stage.setup(Context(config, "rollout-0", tmp_path, events.append))
    yield stage, own, events
    stage.command(Stop())
    stage.close()
    own.close()


def versions(stage):
    batch = Batch({
        "prompt_tokens": [np.array([3, 4, 5])], "temperature": np.ones(1, np.float32), "seed": np.array([7]),
        "rollout_id": np.array([0]), "row": np.array([0]),
    })  # fmt: skip
    (part,) = stage.process(batch)
    return set(part.columns["versions"].values.tolist())


def test_a_version_that_does_not_come_leaves_the_engine_at_work_with_the_one_before(made):
    stage, own, events = made
    shape = weights(spec(vocab_size=len(stage._tokenizer)))
    first = own.publish(1, shape)
    stage.command(Apply(1, first))
    assert events == [Applied(1)]
    assert versions(stage) == {1}
    stage.command(Apply(2, first.replace(first[:1], b"\x00")))
    assert [type(event) for event in events] == [Applied, GaveUp]
    assert "not an offer" in events[1].reason
    assert versions(stage) == {1}
    stage.command(Apply(3, own.publish(3, [(name, torch.zeros_like(tensor)) for name, tensor in shape])))
    assert versions(stage) == {3}
