"""A replica: its loops, of which a stage may have several."""

import threading
from dataclasses import replace

import numpy as np
import pytest

from asyncflow.execute.messages import Failed, Finished, Ready, Stop, Worked
from asyncflow.execute.replica import Assignment, Replica, careful
from asyncflow.pipeline import StageSpec, Take
from asyncflow.storage import Batch, Schema, TransferQueue
from tests.test_serve import CONFIG

together = threading.Barrier(3, timeout=60)


def meet(batch: Batch) -> dict[str, object]:
    """Return only when as many batches as there are lanes are being worked on."""
    together.wait()
    return {"y": batch["x"].array}


@pytest.mark.timeout(120)
def test_a_replica_works_on_as_many_batches_at_once_as_it_has_lanes(tmp_path):
    spec = StageSpec("meet", ("x",), {"y": "int64"}, build=f"{__name__}:meet", take=Take(rows=1), lanes=3)
    events = []
    with TransferQueue.open() as queue:
        table = queue.create_table("train", Schema({"x": "int64", "y": "int64"}))
        table.task("meet", ("x",))
        table.put(Batch({"x": np.arange(6)}))
        table.seal()
        Replica(Assignment("meet-0", (spec,), CONFIG, tmp_path), queue, events.append).serve()
        assert table.ledger().done == 6
    assert [type(events[0]), type(events[-1])] == [Ready, Finished]
    assert sum(isinstance(event, Worked) for event in events) == 6


def breaks(batch: Batch) -> dict[str, object]:
    raise MemoryError("broken")


def test_the_first_error_ends_all_loops_of_a_replica_and_is_told_once(tmp_path):
    specs = tuple(
        StageSpec(name, ("x",), {"y": "int64"}, build=f"{__name__}:breaks", table=name) for name in ("train", "other")
    )
    events = []
    with TransferQueue.open() as queue:
        for spec in specs:
            table = queue.create_table(spec.table, Schema({"x": "int64", "y": "int64"}))
            table.task(spec.name, ("x",))
        queue.table("train").put(Batch({"x": np.arange(3)}))
        Replica(Assignment("breaks-0", specs, CONFIG, tmp_path), queue, events.append).serve()
        assert queue.table("train").status().tasks["train"].waiting == 3
        assert queue.status().streams == 0
    (failed,) = [event for event in events if isinstance(event, Failed)]
    assert "in train of replica breaks-0" in failed.report
    assert "MemoryError: broken" in failed.report
    assert not failed.final
    assert not any(isinstance(event, Finished) for event in events)


@pytest.mark.parametrize("error", [SystemExit("my licence has expired"), KeyboardInterrupt("enough")])
def test_a_stage_that_wants_to_end_the_process_has_failed(tmp_path, monkeypatch, error):
    def leaves(batch: Batch) -> dict[str, object]:
        raise error

    monkeypatch.setattr(f"{__name__}.breaks", leaves)
    spec = StageSpec("train", ("x",), {"y": "int64"}, build=f"{__name__}:breaks")
    events = []
    with TransferQueue.open() as queue:
        table = queue.create_table("train", Schema({"x": "int64", "y": "int64"}))
        table.task("train", ("x",))
        table.put(Batch({"x": np.arange(3)}))
        Replica(Assignment("breaks-0", (spec,), CONFIG, tmp_path), queue, events.append).serve()
        assert table.status().tasks["train"].waiting == 3
    (failed,) = [event for event in events if isinstance(event, Failed)]
    assert str(error) in failed.report
    assert not any(isinstance(event, Finished) for event in events)


def test_an_engine_begins_no_request_before_it_has_weights(tmp_path):
    spec = StageSpec("x", ("x",), {"y": "int64"}, build=f"{__name__}:same", host="rollout", take=Take(rows=1))
    events = []
    with TransferQueue.open() as queue:
        table = queue.create_table("train", Schema({"x": "int64", "y": "int64"}))
        table.task("x", ("x",))
        table.put(Batch({"x": np.arange(2)}))
        replica = Replica(Assignment("rollout-0", (spec,), CONFIG, tmp_path), queue, events.append)
        serving = threading.Thread(target=replica.serve)
        serving.start()
        replica.obey(Stop())
        serving.join(60)
        assert table.status().tasks["x"].done == 0
    assert not any(isinstance(event, Worked) for event in events)


def same(batch: Batch) -> dict[str, object]:
    return {"y": batch["x"].array}


def test_after_two_failures_a_stage_of_ours_takes_one_group_at_a_time(tmp_path):
    ours = StageSpec("rollout", ("x",), {"y": "int64"}, build="asyncflow.stages.rollout:Rollout", take=Take(whole=True))
    assert careful(ours, 4).take == Take(rows=4, whole=True)
    assert careful(replace(ours, table="eval"), 4).take == Take(rows=1, whole=True)
    assert careful(replace(ours, take=Take(groups=64, partial=True)), 4).take == Take(groups=1, partial=True)
    own = replace(ours, build="mine.py:stage")
    assert careful(own, 4) == own
