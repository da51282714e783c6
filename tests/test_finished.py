"""What a checkpoint keeps of finished responses, and how they come back."""

import numpy as np
import pytest

from asyncflow import finished
from asyncflow.config.model import Data, Model, Pipeline, Reward
from asyncflow.config.training import Train
from asyncflow.errors import CheckpointError, WaitTimeout
from asyncflow.finished import Returned
from asyncflow.stages import plan
from asyncflow.storage import Schema, TransferQueue
from asyncflow.storage.batch import Batch

GRAPH = plan(
    Pipeline(
        model=Model(config={"model_type": "qwen2"}, tokenizer="characters"),
        data=Data(source="python"),
        reward=Reward(fn="exact_match"),
        train=Train(group_size=2, prompts_per_step=2),
        mode="async",
    )
).tables["train"]
BEFORE = ("rollout", "reward", "advantage")


def values(stage, count):
    """Columns that a stage writes, of some rows."""
    made = {"string": ["a"] * count, "list<int64>": [[1, 2]] * count, "list<uint8>": [[1, 1]] * count,
            "list<float32>": [[-1.0, -1.0]] * count, "list<int32>": [[0, 0]] * count}  # fmt: skip
    return {
        name: made.get(kind, np.zeros(count, None if "<" in kind or kind == "string" else kind))
        for name, kind in stage.writes.items()
    }


@pytest.fixture
def table():
    with TransferQueue.open() as queue:
        made = queue.create_table("train", Schema(dict(GRAPH.columns)))
        for stage in GRAPH.stages:
            if stage.build:
                reads = [name for name in stage.reads if name != "row"]
                made.task(stage.name, reads, durable=stage.durable, **stage.sampling)
        yield made


def fill(table, done):
    """Put 4 groups of 2 rows; `done` of the 8 rows have all that the trainer reads, the last one of them dropped."""
    source = next(stage for stage in GRAPH.stages if not stage.build)
    rows = table.put(Batch.of(table.schema, {**values(source, 4), "group_id": np.arange(10, 14)}), repeat=2)
    for stage in GRAPH.stages:
        if stage.name in BEFORE:
            table.write(rows[:done], values(stage, done))
    table.drop(rows[done - 1 : done], "lost")
    return rows


def test_whole_groups_are_kept_that_are_finished_and_asked_for(table):
    fill(table, 6)
    kept = finished.collect(table, GRAPH, [10, 11, 12, 13], 2)
    assert kept["group_id"].array.tolist() == [10, 10, 11, 11], "one row of 12 was dropped, 13 is not finished"
    assert finished.collect(table, GRAPH, [11, 13], 2)["group_id"].array.tolist() == [11, 11]
    assert finished.collect(table, GRAPH, [13], 2) is None


def test_they_come_back_done_by_all_before_the_trainer_which_gets_them_when_training_begins(table, tmp_path):
    fill(table, 8)
    kept = finished.collect(table, GRAPH, range(10, 14), 2)
    finished.write(kept, tmp_path / "checkpoint" / "rows")
    with TransferQueue.open() as queue:
        other = queue.create_table("train", table.schema)
        for stage in GRAPH.stages:
            if stage.build:
                other.task(stage.name, [name for name in stage.reads if name != "row"], **stage.sampling)
        returned = Returned.to(other, GRAPH, finished.read(tmp_path / "checkpoint" / "rows"))
        assert all(other.status().tasks[name].done == 6 for name in BEFORE)
        with other.stream("train", groups=1) as stream, pytest.raises(WaitTimeout):
            stream.next(timeout=0.05)
        returned.begin()
        with other.stream("train", groups=3) as stream:
            lease = stream.next(timeout=5.0)
        assert sorted(lease.batch["group_id"].array.tolist()) == [10, 10, 11, 11, 12, 12]
        assert other.read(returned.ids, kept.names).equals(kept)


def test_a_file_that_is_damaged_is_named_and_none_is_no_fault(tmp_path):
    assert finished.read(tmp_path / "rows") is None
    (tmp_path / "rows").write_bytes(b"no arrow")
    with pytest.raises(CheckpointError, match=r"rows is damaged: .*; without it, its responses are generated again"):
        finished.read(tmp_path / "rows")
