"""Rollout under command: weights are asked for while it generates, and it ends when it is told to."""

import threading
from queue import SimpleQueue

import numpy as np
import pytest

from asyncflow.backends.infer.transformers import TransformersEngine
from asyncflow.backends.models import new_model
from asyncflow.config.model import Data, Model, Pipeline, Reward, Rollout, Weights
from asyncflow.data.tokenizer import tokenizer
from asyncflow.errors import QueueClosed
from asyncflow.execute.messages import Applied, Apply, GaveUp, Stop, Traced
from asyncflow.stage import Context, Drop, Part
from asyncflow.stages import rollout
from asyncflow.stages.model import model_spec
from asyncflow.storage import Batch
from asyncflow.weights import sender
from tests.backends.tiny import CONFIG


@pytest.fixture(params=["interrupt", "drain", "boundary"])
def stage(request, tmp_path):
    """A rollout stage whose engine has version 0, with version 1 published; and the versions that it told of."""
    shape = {key: value for key, value in CONFIG.items() if key != "vocab_size"}
    config = Pipeline(
        model=Model(config=shape, tokenizer="characters"),
        data=Data(source="python"),
        reward=Reward(fn="exact_match"),
        rollout=Rollout(max_response_tokens=20, max_inflight=8),
        mode="async",
        weights=Weights(apply=request.param),
    )
    trainer = sender(config, tmp_path)
    state = new_model(model_spec(config, tokenizer(config.model), None)).state_dict()
    first, second = (trainer.publish(version, state.items()) for version in (0, 1))
    told: SimpleQueue[object] = SimpleQueue()
    made = rollout.Rollout()
    made.setup(Context(config, "rollout-0", tmp_path, lambda event: isinstance(event, Traced) or told.put(event)))
    made.command(Apply(0, first))
    assert told.get(timeout=30) == Applied(0)
    yield made, told, Apply(1, second)
    made.close()
    trainer.close()


def batch(rows=4):
    return Batch(
        {
            "prompt_tokens": [np.array([5, 6])] * rows,
            "temperature": np.ones(rows, np.float32),
            "seed": np.arange(rows),
            "rollout_id": np.arange(rows),
        }
    )


def answering(made):
    """Answer a batch in a thread; return it, and the list that gets its parts, or the error that ended it."""
    came = []

    def answer():
        try:
            came.extend(made.process(batch()))
        except QueueClosed as error:
            came.append(error)

    thread = threading.Thread(target=answer, daemon=True)
    thread.start()
    return thread, came


def test_new_weights_are_asked_for_without_a_wait_and_told_of_when_they_are_used(stage):
    made, told, newer = stage
    made._engine.pause()
    thread, came = answering(made)
    made.command(newer)
    made._engine.resume()
    thread.join(30)
    assert told.get(timeout=30) == Applied(1)
    assert made._engine.version == 1
    assert sorted(np.concatenate([part.positions for part in came]).tolist()) == [0, 1, 2, 3]


def until(condition):
    for _ in range(3000):
        if condition():
            return
        threading.Event().wait(0.01)
    raise AssertionError("it did not come to pass")


def test_responses_that_were_aborted_leave_and_are_not_trained(stage):
    made, _, _ = stage
    made._engine.pause()
    thread, came = answering(made)
    until(lambda: made._engine.capacity.waiting == 4)
    made._engine.abort([1])
    made._engine.resume()
    thread.join(30)
    (drop,) = [one for one in came if isinstance(one, Drop)]
    assert (drop.positions.tolist(), drop.reason) == ([1], "aborted")
    parts = [one for one in came if isinstance(one, Part)]
    assert sorted(np.concatenate([part.positions for part in parts]).tolist()) == [0, 2, 3]


def test_a_lane_waits_while_the_engine_is_full_and_until_the_end(stage):
    made, _, _ = stage
    assert made._engine.capacity.limit == 8
    made._engine.pause()
    threads = [answering(made)[0] for _ in range(2)]
    until(lambda: made._engine.capacity.waiting == 8)
    through = []

    def lane():
        try:
            made.await_room()
            through.append("through")
        except QueueClosed:
            through.append("closed")

    first = threading.Thread(target=lane, daemon=True)
    first.start()
    first.join(0.2)
    assert through == []
    made._engine.resume()
    for thread in (first, *threads):
        thread.join(30)
    assert through == ["through"]
    made._engine.pause()
    threads = [answering(made)[0] for _ in range(2)]
    until(lambda: made._engine.capacity.waiting == 8)
    second = threading.Thread(target=lane, daemon=True)
    second.start()
    made.command(Stop())
    for thread in (second, *threads):
        thread.join(30)
    assert through == ["through", "closed"]


@pytest.mark.parametrize("mode", ["colocated", "separated"])
def test_the_engine_sleeps_between_phases_where_devices_are_shared(tmp_path, monkeypatch, mode):
    shape = {key: value for key, value in CONFIG.items() if key != "vocab_size"}
    config = Pipeline(
        model=Model(config=shape, tokenizer="characters"),
        data=Data(source="python"),
        reward=Reward(fn="exact_match"),
        rollout=Rollout(max_response_tokens=4),
        mode=mode,
    )
    called = []
    for name in ("wake", "submit", "sleep"):
        real = getattr(TransformersEngine, name)
        monkeypatch.setattr(
            TransformersEngine, name, lambda *given, real=real, name=name: (called.append(name), real(*given))[1]
        )
    trainer = sender(config, tmp_path)
    state = new_model(model_spec(config, tokenizer(config.model), None)).state_dict()
    told: SimpleQueue[object] = SimpleQueue()
    made = rollout.Rollout()
    made.setup(Context(config, "rollout-0", tmp_path, lambda event: isinstance(event, Traced) or told.put(event)))
    made.command(Apply(0, trainer.publish(0, state.items())))
    assert told.get(timeout=30) == Applied(0)
    for _ in range(2):
        assert len(list(made.process(batch()))) > 0
    made.close()
    trainer.close()
    assert called == (["wake", "submit", "sleep"] * 2 if mode == "colocated" else ["submit"] * 2)


def test_it_ends_at_once_whatever_is_under_way(stage):
    made, told, newer = stage
    made._engine.pause()
    thread, came = answering(made)
    made.command(newer)
    made.command(Stop())
    thread.join(30)
    assert [type(one) for one in came] == [QueueClosed]
    assert told.empty() or told.get() == Applied(1)


def test_a_version_that_does_not_come_leaves_the_engine_at_work_with_the_one_before(stage):
    made, told, newer = stage
    made.command(Apply(1, newer.offer.replace(newer.offer[:1], b"\x00")))
    gave_up = told.get(timeout=30)
    assert isinstance(gave_up, GaveUp)
    assert "not an offer" in gave_up.reason
    thread, came = answering(made)
    thread.join(30)
    assert {int(version) for part in came for version in part.columns["versions"].values} == {0}
    made.command(newer)
    assert told.get(timeout=30) == Applied(1)
