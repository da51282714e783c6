import json
import time

import pytest

from asyncflow.cli.trace import trace
from asyncflow.execute.messages import Worked
from asyncflow.observe.trace import TRACE, Trace


@pytest.fixture
def going(tmp_path):
    """Folder of a run that has made a step and still goes on."""
    run = Trace(tmp_path / TRACE)
    for replica, busy in (("rollout-0", 0.2), ("rollout-1", 0.7), ("reward-0", 0.1)):
        stage = replica.rpartition("-")[0]
        run.take(replica, Worked("train", stage, replica, 8, busy, 0.0, 0.0, started=time.monotonic()))
    run.record({"kind": "step", "step": 1, "version": 1, "rows": 16.0, "rows_dropped": 0})
    yield tmp_path
    run.close()


def test_it_writes_the_timeline_and_says_where_the_time_went(going, capsys):
    assert trace(going, None) == 0
    assert json.loads((going / "trace.json").read_text())["traceEvents"]
    output = capsys.readouterr().out
    assert "3 batches, 1 steps" in output
    assert "bottleneck: rollout (rollout-1 works" in output
    stages = [line.split()[:2] for line in output.splitlines() if {"rollout-0", "rollout-1"} & set(line.split())]
    assert stages[:2] == [["rollout", "rollout-1"], ["rollout-0", *stages[1][1:]]]
    assert "ui.perfetto.dev" in output


def test_the_output_may_be_elsewhere_and_one_that_cannot_be_written_is_named(going, tmp_path, capsys):
    assert trace(going, tmp_path / "other.json") == 0
    assert (tmp_path / "other.json").exists()
    assert not (going / "trace.json").exists()
    assert trace(going, tmp_path / "missing" / "other.json") == 1
    assert "missing" in capsys.readouterr().err


def test_a_folder_without_a_trace_is_a_mistake_of_the_user(tmp_path, capsys):
    assert trace(tmp_path, None) == 2
    assert "expected the folder of a run that has begun with output.trace: true" in capsys.readouterr().err


def test_before_the_first_batch_there_is_nothing_to_show(tmp_path, capsys):
    Trace(tmp_path / TRACE).close()
    assert trace(tmp_path, None) == 0
    assert "no batch of the train table is finished yet" in capsys.readouterr().out
