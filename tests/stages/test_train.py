"""The trainer's gate: what becomes of rows that are too old, by each policy, on a real engine and a real queue."""

import threading
from queue import SimpleQueue

import numpy as np
import pytest

from asyncflow.config.model import Data, Model, Pipeline, Reward
from asyncflow.config.training import Train
from asyncflow.errors import StalenessExceeded, WeightsError
from asyncflow.execute.messages import Copied, Dropped, Failed, Save, Saved, Stepped
from asyncflow.serve import run
from asyncflow.stage import Context
from asyncflow.stages import plan, train
from asyncflow.storage import Batch, Schema, TransferQueue
from asyncflow.storage.batch import Column
from tests.backends.tiny import CONFIG

VERSIONS = {0: [0, 0], 1: [0, 0], 2: [0, 0], 3: [0, 1], 4: [0, 2], 5: [2, 2], 6: [1, 2]}
"""Of each group, the versions of the two tokens of its rows: at version 2 those of group 4 are too old by one."""


def pipeline(budget=64, **options):
    return Pipeline(
        model=Model(config=CONFIG, tokenizer="characters"),
        data=Data(source="python"),
        reward=Reward(fn="exact_match"),
        train=Train(group_size=2, prompts_per_step=2, token_budget=budget, steps=3),
        **{"mode": "async", **options},
    )


def rows(requeued, masked=True):
    groups = np.repeat(list(VERSIONS), 2)
    count = len(groups)
    ragged = {
        "prompt_tokens": np.full(2 * count, 5),
        "response_tokens": np.full(2 * count, 7),
        # The first step has nothing to train on: made up log-probabilities are no fault of the engine.
        "response_mask": np.repeat((groups > 1) | (not masked), 2).astype(np.uint8),
        "rollout_logprobs": np.full(2 * count, -3.0, np.float32),
        "versions": np.array([VERSIONS[group] for group in groups], np.int32).reshape(-1),
    }
    bounds = np.arange(count + 1) * 2
    columns = {name: Column.ragged(values, bounds, f"list<{values.dtype}>") for name, values in ragged.items()}
    advantage = np.tile([1.0, -1.0], len(VERSIONS))
    return Batch({
        **columns, "group_id": groups, "reward": advantage, "advantage": advantage,
        "reward_outcome": ["ok"] * count,
        "requeued": np.full(count, requeued, np.int32),
    })  # fmt: skip


def serve(tmp_path, requeued=0, masked=True, **options):
    """Run the trainer over all groups; return the events and what the table then holds."""
    config = pipeline(**options)
    graph = plan(config).tables["train"]
    spec = next(stage for stage in graph.stages if stage.name == "train")
    with TransferQueue.open() as queue:
        table = queue.create_table("train", Schema(dict(graph.columns)))
        table.task("train", spec.reads, sampler=spec.take.sampler, durable=True)
        table.put(rows(requeued, masked))
        table.seal()
        events = []
        context = Context(config, "trainer-0", tmp_path, events.append)
        stage = train.Train()
        stage.setup(context)
        run(spec, stage, queue, context)
        stage.close()
        found = table.find()
        done = found.rows[found.has(["trained_by"])]
        return events, table.read(done, ["group_id", "trained_by", "staleness", "trained_mask"]), table.ledger()


def steps(events):
    return [event.groups for event in events if isinstance(event, Stepped)]


def dropped(events):
    return [(event.reason, event.groups) for event in events if isinstance(event, Dropped)]


def test_mask_keeps_the_row_without_its_stale_tokens(tmp_path):
    events, left, _ = serve(tmp_path, on_stale="mask")
    assert steps(events) == [(0, 1), (2, 3), (4, 5)]
    assert dropped(events) == []
    made = [event.metrics for event in events if isinstance(event, Stepped)]
    assert [metrics["staleness_max"] for metrics in made] == [0, 1, 0]
    assert made[2]["trained_tokens"] == 2 + 4
    assert (made[2]["stale_rows"], made[2]["stale_tokens"], made[2]["stale_response_tokens_mean"]) == (2, 2, 2)
    assert made[1]["stale_rows"] == 0
    assert left["trained_by"].array.tolist() == [1] * 4 + [2] * 4 + [3] * 4
    assert left["staleness"].array.tolist() == [0] * 4 + [1] * 4 + [0] * 4
    assert [one.tolist() for one in left["trained_mask"]] == [[0, 0]] * 4 + [[1, 1]] * 4 + [[0, 1]] * 2 + [[1, 1]] * 2


@pytest.mark.parametrize(
    ("policy", "requeued", "reason"), [("drop", 0, "stale"), ("requeue", 0, "requeued"), ("requeue", 2, "stale")]
)
def test_others_come_for_what_was_let_go(tmp_path, policy, requeued, reason):
    events, left, ledger = serve(tmp_path, requeued, on_stale=policy)
    assert steps(events) == [(0, 1), (2, 3), (5, 6)]
    assert dropped(events) == [(reason, (4, 4))]
    assert set(left["group_id"].array.tolist()) == {0, 1, 2, 3, 5, 6}
    assert ledger.dropped == {reason: 2}
    assert ledger.admitted == 14


def test_where_none_may_be_stale_one_that_is_ends_the_run(tmp_path):
    with pytest.raises(StalenessExceeded, match="row 8 is 2 versions old and max_staleness is 1"):
        serve(tmp_path, on_stale="wait")


@pytest.mark.parametrize("mode", ["separated", "streaming"])
def test_outside_of_async_a_stale_row_is_a_fault_and_never_masked(tmp_path, mode):
    with pytest.raises(StalenessExceeded, match="max_staleness is 0"):
        serve(tmp_path, mode=mode)


def test_an_engine_whose_log_probabilities_are_not_those_of_the_trainer_ends_the_run_at_the_first_step(tmp_path):
    with pytest.raises(WeightsError, match="they are not the same model"):
        serve(tmp_path, masked=False)


def checkpointing(tmp_path, monkeypatch, write):
    """A trainer that is told to write a checkpoint, by this function; and what it says."""
    told: SimpleQueue[object] = SimpleQueue()
    monkeypatch.setattr(train.checkpoint, "snapshot", lambda *_: write)
    stage = train.Train()
    stage.setup(Context(pipeline(budget=8), "trainer-0", tmp_path, told.put))
    stage.command(Save(str(tmp_path / "checkpoint"), {}))
    return stage, told


def heard(told, kind):
    """Return the next event of a kind."""
    while not isinstance(event := told.get(timeout=30), kind):
        pass
    return event


def test_training_goes_on_while_a_checkpoint_is_written(tmp_path, monkeypatch):
    go = threading.Event()
    stage, told = checkpointing(tmp_path, monkeypatch, lambda folder: go.wait(30))
    heard(told, Copied)
    group = rows(0).take([4, 5]).with_columns({"row": np.array([4, 5])})
    assert list(stage.process(group)) == []
    assert stage.trainer.report["tokens"] == 4
    go.set()
    assert heard(told, Saved) == Saved(str(tmp_path / "checkpoint"), 0)
    stage.close()


def test_a_checkpoint_that_cannot_be_written_is_told_with_its_folder(tmp_path, monkeypatch):
    def full(folder):
        raise OSError(28, "No space left on device")

    stage, told = checkpointing(tmp_path, monkeypatch, full)
    report = heard(told, Failed).report
    assert f"saving {tmp_path / 'checkpoint'}" in report
    assert "No space left" in report
    stage.close()


def test_the_budget_changes_when_rows_enter_the_gradient_and_not_the_step(tmp_path):
    whole, split = (
        [event.metrics for event in serve(tmp_path, budget=budget)[0] if isinstance(event, Stepped)]
        for budget in (64, 8)
    )
    assert len(whole) == len(split) == 3
    for one, other in zip(whole, split, strict=True):
        assert other.pop("staleness_histogram") == one.pop("staleness_histogram")
        assert other == pytest.approx(one, rel=1e-4, abs=1e-6)


def test_a_step_tells_what_of_its_staleness_came_in_flight_and_what_in_the_queue(tmp_path):
    second = next(event for event in serve(tmp_path)[0] if isinstance(event, Stepped) and event.version == 2).metrics
    # At version 1: both tokens of group 2 are of version 0, those of group 3 of versions 0 and 1.
    assert second["staleness_histogram"] == [0, 4]
    assert (second["staleness_in_queue_mean"], second["staleness_in_queue_max"]) == (0.5, 1)
    assert (second["staleness_in_flight_mean"], second["staleness_in_flight_max"]) == (0.5, 1)


def test_rows_that_are_dropped_say_how_long_they_were(tmp_path):
    (event,) = [event for event in serve(tmp_path, on_stale="drop")[0] if isinstance(event, Dropped)]
    assert event.lengths == (2, 2)


def test_rows_enter_the_gradient_before_the_step_is_full(tmp_path):
    stage = train.Train()
    stage.setup(Context(pipeline(budget=8), "trainer-0", tmp_path, lambda event: None))
    group = rows(0).take([4, 5]).with_columns({"row": np.array([4, 5])})
    assert list(stage.process(group)) == [], "half a step"
    assert stage.trainer.report["tokens"] == 4
    stage.close()
