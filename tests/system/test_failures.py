"""Runs whose replicas die or fail: they go on as if nothing had happened, or end with the error and a checkpoint."""

import json
import logging
import multiprocessing
import os
import signal
from pathlib import Path

import pytest

from asyncflow import Flow
from asyncflow.checkpoint import progress
from asyncflow.errors import ReplicaFailed
from tests.system.test_modes import LONG, check_bound, check_ledger, trained
from tests.system.test_resume import samples, until
from tests.system.test_run import timeless

pytestmark = pytest.mark.timeout(1200)  # processes start slowly where cores are shared


def kill(flow: Flow, replica: str) -> None:
    """Kill a replica's process as the system would, and wait until another is in its place."""
    assert flow.conductor is not None
    before = flow.conductor.executor.pids[replica]
    assert before is not None
    os.kill(before, signal.SIGKILL)
    until(lambda: flow.conductor.restarts.counts[replica] > 0 or flow.phase == "ended")


def steps(flow: Flow, count: int) -> None:
    until(lambda: len(flow.metrics.of("step")) >= count or flow.phase == "ended")


def test_engines_that_are_killed_change_no_number_of_a_run_in_phases(pipeline, tmp_path):
    path = pipeline(mode="separated", train={"steps": 4, "kl_coef": 0.1}, warmup=None, rollout={"replicas": 2})
    undisturbed = Flow.from_yaml(path, f"output.folder={tmp_path / 'undisturbed'}").start().wait(600)
    flow = Flow.from_yaml(path).start()
    until(lambda: flow.phase == "evaluating before" or flow.phase == "ended")
    kill(flow, "rollout-0")
    steps(flow, 1)
    kill(flow, "rollout-1")
    kill(flow, "reference-0")
    summary = flow.wait(600)
    assert timeless(summary.folder) == timeless(undisturbed.folder)
    assert samples(summary.folder) == samples(undisturbed.folder)
    assert summary["ledger"] == undisturbed["ledger"]
    assert summary["restarts"] == {"rollout-0": 1, "rollout-1": 1, "reference-0": 1}
    assert undisturbed["restarts"] == {}
    assert multiprocessing.active_children() == []


def test_an_engine_that_is_killed_between_tokens_costs_an_asynchronous_run_no_row_and_not_its_bound(pipeline):
    flow = Flow.from_yaml(pipeline(**{**LONG, "train": {"steps": 6}}, rollout={"max_inflight": 8})).start()
    steps(flow, 1)
    kill(flow, "rollout-0")
    summary = flow.wait(600)
    assert summary["ledger"] == {"admitted": 96, "done": 96, "dropped": {}, "live": 0}
    check_ledger(flow.folder, steps=6)
    check_bound(trained(flow.folder), 1)
    assert summary["restarts"] == {"rollout-0": 1}


BROKEN = """
from pathlib import Path

import numpy as np

from asyncflow.stage import Drop, Part, stage


@stage(reads=["reward"], writes={"extra": "float64"})
def fails(batch):
    if Path("broken").exists():
        if Path("broken").read_text() == "once":
            Path("broken").unlink()
        raise KeyError("broken " + "stage")
    return {"extra": batch["reward"].array}


@stage(reads=["reward"], writes={})
def sinks(batch):
    if Path("broken").exists():
        raise KeyError("broken " + "sink")


@stage(reads=["reward", "group_id"], writes={"extra": "float64"})
def picks(batch):
    \"\"\"Drop whole groups, one of every three.\"\"\"
    gone = batch["group_id"].array % 3 == 1
    yield Drop(np.flatnonzero(gone), "unwanted")
    yield Part(np.flatnonzero(~gone), {"extra": batch["reward"].array[~gone]})
"""


@pytest.fixture
def broken(tmp_path, monkeypatch) -> Path:
    """The file that makes the stage fail."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "broken.py").write_text(BROKEN)
    return tmp_path / "broken"


def test_a_stage_that_fails_once_begins_again(pipeline, broken, caplog):
    flow = Flow.from_yaml(pipeline(stages=[{"fn": "broken.py:fails"}], warmup=None, eval={"rows": 0})).start()
    broken.write_text("once")
    summary = flow.wait(600)
    assert summary["complete"]
    assert summary["restarts"] == {"fails-0": 1}
    assert summary["ledger"] == {"admitted": 48, "done": 48, "dropped": {}, "live": 0}
    (warning,) = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert "replica fails-0 failed and is started again" in warning.getMessage()
    assert "broken stage" in warning.getMessage()


def test_a_stage_that_always_fails_ends_the_run_with_its_error_after_a_checkpoint(pipeline, broken):
    changes = {"stages": [{"fn": "broken.py:fails"}], "warmup": None, "eval": {"rows": 0}, "train": {"steps": 50}}
    flow = Flow.from_yaml(pipeline(**changes)).start()
    steps(flow, 1)
    broken.write_text("always")
    with pytest.raises(ReplicaFailed, match=r"(?s)fails-0.*KeyError: 'broken stage'.*started again 3 times before"):
        flow.wait(600)
    assert progress(flow.folder / "checkpoint")["step"] >= 1
    assert multiprocessing.active_children() == []
    broken.unlink()
    assert Flow.resume(flow.folder).config.train.steps == 50


@pytest.mark.parametrize("mode", ["separated", "streaming", "async"])
def test_groups_that_a_stage_beside_the_trainer_drops_are_replaced_and_not_trained(pipeline, broken, mode):
    stages = [{"fn": "broken.py:picks"}]
    summary = Flow.from_yaml(pipeline(mode=mode, stages=stages, warmup=None, eval={"rows": 0})).start().wait(600)
    assert summary["complete"]
    assert summary["ledger"]["done"] == 48
    assert set(summary["ledger"]["dropped"]) == {"unwanted"}
    assert sum(len(rows) for rows in samples(summary.folder).values()) == 48


def test_a_sink_that_always_fails_costs_no_row_and_ends_the_run_with_its_error(pipeline, broken):
    changes = {"stages": [{"fn": "broken.py:sinks"}], "warmup": None, "eval": {"rows": 0}, "train": {"steps": 50}}
    flow = Flow.from_yaml(pipeline(**changes)).start()
    steps(flow, 1)
    broken.write_text("always")
    with pytest.raises(ReplicaFailed, match=r"(?s)sinks-0.*KeyError: 'broken sink'.*started again 3 times before"):
        flow.wait(600)
    assert flow.conductor.ledger.dropped == {}
    assert progress(flow.folder / "checkpoint")["step"] >= 1


ENGINES = """
import os
import signal
from pathlib import Path

from asyncflow.backends.infer.transformers import TransformersEngine


def die():
    os.kill(os.getpid(), signal.SIGKILL)


class Poison(TransformersEngine):
    def submit(self, requests):
        if any(len(request.prompt) == 6 for request in requests):
            die()
        super().submit(requests)


class Mortal(TransformersEngine):
    def results(self, keys):
        for finished in super().results(keys):
            for one in finished:
                yield [one]
                if Path("mortal").exists() and self.version >= int(Path("mortal").read_text()):
                    Path("mortal").unlink()
                    die()
"""


@pytest.fixture
def engines(tmp_path, engine) -> Path:
    """Return the folder that the engines run in."""
    engine("dying", ENGINES, "poison", "mortal")
    return tmp_path


@pytest.mark.usefixtures("engines")
def test_a_prompt_that_kills_its_engine_every_time_is_dropped_alone_and_replaced(pipeline):
    path = pipeline(
        mode="separated",
        data={"source": "python", "shuffle": False},
        rollout={"backend": "poison"},
        train={"steps": 2},
        eval={"rows": 0},
        warmup=None,
    )
    words = ["big", "bat", "toxic", "bet", "dig", "dog", "mad", "mat", "met"]
    summary = Flow.from_yaml(path, dataset=[{"word": word} for word in words]).start().wait(900)
    assert summary["ledger"] == {"admitted": 36, "done": 32, "dropped": {"max_attempts:rollout": 4}, "live": 0}
    assert summary["restarts"] == {"rollout-0": 3}


def test_an_engine_that_dies_between_the_rows_of_a_batch_changes_no_number_of_a_run_in_phases(pipeline, engines):
    path = pipeline(rollout={"backend": "mortal"}, warmup=None, eval={"rows": 0})
    undisturbed = Flow.from_yaml(path).start().wait(600)
    (engines / "mortal").write_text("1")
    summary = Flow.from_yaml(path).start().wait(600)
    assert summary["restarts"] == {"rollout-0": 1}
    assert timeless(summary.folder) == timeless(undisturbed.folder)
    assert samples(summary.folder) == samples(undisturbed.folder)


def test_an_engine_that_dies_between_the_rows_of_a_group_leaves_them_what_they_have(pipeline, engines):
    (engines / "mortal").write_text("1")
    changes = {**LONG, "train": {"steps": 5}, "warmup": None, "rollout": {"backend": "mortal", "max_inflight": 8}}
    summary = Flow.from_yaml(pipeline(**changes)).start().wait(600)
    assert summary["restarts"] == {"rollout-0": 1}
    assert summary["ledger"] == {"admitted": 80, "done": 80, "dropped": {}, "live": 0}
    assert all(step["staleness_max"] <= 1 for step in summary_steps(summary.folder))


def summary_steps(folder: Path) -> list[dict[str, object]]:
    return [record for record in timeless(folder) if record["kind"] == "step"]


def test_an_engine_that_is_killed_when_the_run_ends_leaves_nothing_behind(pipeline):
    flow = Flow.from_yaml(pipeline(warmup=None, eval={"rows": 0})).start()
    steps(flow, 3)
    os.kill(flow.conductor.executor.pids["rollout-0"], signal.SIGKILL)
    assert flow.wait(600)["complete"]
    assert multiprocessing.active_children() == []


HANGS = """
import time
from pathlib import Path

from asyncflow.stage import stage


@stage(reads=["reward"], writes={"extra": "float64"})
def hangs(batch):
    ends = time.monotonic() + 300
    while not Path("go").exists() and time.monotonic() < ends:
        time.sleep(0.05)
    return {"extra": batch["reward"].array}
"""


def test_a_run_that_stands_still_says_which_stage_holds_which_rows(pipeline, tmp_path, monkeypatch, caplog):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "hangs.py").write_text(HANGS)
    path = pipeline(
        stages=[{"fn": "hangs.py:hangs"}],
        train={"reward": "extra", "steps": 1},
        warmup=None,
        eval={"rows": 0},
        executor={"stall_timeout": 2},
    )
    flow = Flow.from_yaml(path).start()

    def said() -> list[str]:
        messages = [record.getMessage() for record in caplog.records]
        return [message for message in messages if "16 rows lack extra" in message]

    until(lambda: bool(said()) or flow.phase == "ended")
    (tmp_path / "go").touch()
    assert flow.wait(600)["complete"]
    message = said()[0]
    assert "waiting for step 1 to be trained; nothing has moved for" in message
    assert "stage advantage waits for all rows: 16 rows lack extra (rows 0, 1, 2, 3, 4, …; 16 rows held by hangs-0" in (
        message
    )


def test_the_trainer_that_is_killed_ends_the_run(pipeline):
    flow = Flow.from_yaml(pipeline(train={"steps": 500}, warmup=None, output={"checkpoint_every": 1})).start()
    steps(flow, 1)
    pid = flow.conductor.executor.pids["trainer-0"]
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(ReplicaFailed, match=r"(?s)trainer-0.*ended by signal SIGKILL"):
        flow.wait(600)
    assert multiprocessing.active_children() == []
    assert json.loads((flow.folder / "metrics.jsonl").read_text().splitlines()[-1])["kind"] in ("step", "eval")
