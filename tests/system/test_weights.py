"""Whole runs over each channel: versions arrive, and nothing of them is left."""

import json
import os
import re
import signal
from pathlib import Path

import pytest

from asyncflow import Flow
from asyncflow.errors import ReplicaFailed
from asyncflow.storage.arena import FOLDER
from tests.system.test_modes import ROWS
from tests.system.test_resume import until
from tests.system.test_run import timeless

pytestmark = pytest.mark.timeout(1200)  # processes start slowly where cores are shared

SHORT = {"mode": "async", "eval": {"rows": 0}, "warmup": None, "train": {"steps": 3}, "rollout": {"max_inflight": 8}}


@pytest.mark.parametrize("channel", ["shm", "tcp", "collective"])
def test_a_run_gets_its_weights_over_each_channel(pipeline, channel):
    delta = channel != "collective"
    weights = {"channel": channel, "delta": delta}
    folder = Flow.from_yaml(pipeline(**SHORT, weights=weights), "rollout.replicas=2").start().wait(300).folder
    steps = [record for record in timeless(folder) if record["kind"] == "step"]
    assert [(step["step"], step["version"], step["rows"]) for step in steps] == [(1, 1, 16), (2, 2, 16), (3, 3, 16)]
    assert steps[0]["logprob_gap_max"] < 1e-4
    assert all(step["weights_given_up"] == 0 and step["publish_lag_max"] >= 0 for step in steps)
    ledger = json.loads((folder / "summary.json").read_text())["ledger"]
    assert ledger["done"] == 3 * ROWS
    assert not (folder / "weights").exists()


def test_a_trainer_that_is_killed_leaves_no_shared_memory(pipeline):
    path = pipeline(**{**SHORT, "train": {"steps": 500}}, weights={"channel": "shm"})
    flow = Flow.from_yaml(path).start()
    until(lambda: bool(flow.metrics.of("step")) or flow.phase == "ended")
    assert flow.conductor is not None
    trainer = flow.conductor.executor._processes["trainer-0"].process.pid
    mapped = set(re.findall(rf"{FOLDER}/asyncflow-\w+-\d+", Path(f"/proc/{trainer}/maps").read_text()))
    os.kill(trainer, signal.SIGKILL)
    with pytest.raises(ReplicaFailed, match="trainer-0"):
        flow.wait(300)
    assert mapped
    assert not [name for name in mapped if Path(name).exists()]
