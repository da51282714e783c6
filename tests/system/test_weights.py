"""Whole runs over each channel: versions arrive, and nothing of them is left."""

import json
import os
import re
import signal
from pathlib import Path

import pyarrow.parquet as pq
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


LOSSY = """
import os
from pathlib import Path
from asyncflow.backends.infer.transformers import TransformersEngine
from asyncflow.weights.file import FileOffer, FileReceiver

load = FileReceiver.load


def losing(self, offer, held, deadline):
    found = FileOffer.decode(offer)
    if found.version == 3:
        Path(found.path).unlink(missing_ok=True)
    if found.version == 4:
        os.truncate(found.path, 2000)
    return load(self, offer, held, deadline)


FileReceiver.load = losing
Lossy = TransformersEngine
"""


def test_a_run_goes_on_without_versions_that_are_lost_or_damaged_on_their_way(pipeline, engine):
    engine("lossy", LOSSY)
    changes = {**SHORT, "train": {"steps": 8}, "rollout": {"backend": "lossy"}, "output": {"samples_every": 1}}
    folder = Flow.from_yaml(pipeline(**changes)).start().wait(300).folder
    steps = [record for record in timeless(folder) if record["kind"] == "step"]
    assert len(steps) == 8
    assert 1 <= sum(step["weights_given_up"] for step in steps) <= 2, "one that is published late may be skipped"
    assert all(step["staleness_max"] <= 1 for step in steps)
    made = {version for row in rows(folder) for version in row["versions"]}
    assert not made & {3, 4}
    assert max(made) >= 5, "it has the newer ones"


def rows(folder: Path) -> list[dict[str, list[int]]]:
    return [row for path in (folder / "samples").glob("*.parquet") for row in pq.read_table(path).to_pylist()]


HOT = """
from dataclasses import replace
from asyncflow.backends.infer.transformers import TransformersEngine


class Hot(TransformersEngine):
    def submit(self, requests):
        super().submit([replace(one, sampling=replace(one.sampling, temperature=1.5)) for one in requests])
"""


def test_an_engine_that_samples_at_another_temperature_is_found_out_at_the_first_step(pipeline, engine):
    engine("hot", HOT)
    # A model whose answers differ in likelihood: a new one gives them all the same, at any temperature.
    path = pipeline(mode="separated", eval={"rows": 0}, warmup={"steps": 20, "lr": 0.01}, rollout={"backend": "hot"})
    with pytest.raises(ReplicaFailed, match="log-probabilities of trainer and rollout engine differ by"):
        Flow.from_yaml(path).start().wait(300)


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
