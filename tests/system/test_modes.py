"""Runs whose stages overlap: what is trained, how old it is, and that nothing is trained twice or skipped."""

import json
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from asyncflow import Flow, finished
from asyncflow.checkpoint import FINISHED, progress
from asyncflow.data.order import Order
from tests.system.conftest import WORDS
from tests.system.test_ends import command, nobody_left
from tests.system.test_resume import until
from tests.system.test_run import timeless
from tests.system.traces import check_trace

pytestmark = pytest.mark.timeout(1200)  # processes start slowly where cores are shared

GROUPS, ROWS, WARMUP = 4, 16, 2


def trained(folder: Path) -> list[dict[str, object]]:
    """Every row that the run trained, as its own files have them."""
    files = sorted((folder / "samples").glob("step-*.parquet"))
    assert [int(path.stem[5:]) for path in files] == list(range(1, len(files) + 1))
    tables = [pq.read_table(path).to_pylist() for path in files]
    for step, rows in enumerate(tables, start=1):
        assert {row["trained_by"] for row in rows} == {WARMUP + step}
    return [row for rows in tables for row in rows]


def check_bound(rows: list[dict[str, object]], bound: int) -> None:
    """No token that was trained was older than the bound: the version being trained is one before the one made."""
    for row in rows:
        ages = [row["trained_by"] - 1 - version for version in row["versions"]]
        assert max(ages) == row["staleness"] <= bound
        assert len(row["trained_mask"]) == len(ages)
        assert min(ages) >= 0


def check_ledger(folder: Path, steps: int) -> None:
    """Every group was trained once, none was left out, and the books say so."""
    rows = trained(folder)
    assert sorted({row["group_id"] for row in rows}) == list(range(GROUPS * steps))
    assert len({(row["group_id"], row["rollout_id"]) for row in rows}) == len(rows) == ROWS * steps


def check_from_outside(folder: Path, bound: int) -> None:
    """A script that knows nothing of the engine finds the same, and would find a bound that was not kept."""
    script = [sys.executable, Path(__file__).parents[2] / "examples" / "check_staleness.py", folder]
    assert subprocess.run(script, check=False, capture_output=True, timeout=60).returncode == 0
    config = folder / "config.yaml"
    config.write_text(config.read_text().replace(f"max_staleness: {bound}", "max_staleness: 0"))
    assert subprocess.run(script, check=False, capture_output=True, timeout=60).returncode == int(bound > 0)


def test_a_streaming_run_trains_on_what_the_newest_weights_made(pipeline):
    folder = Flow.from_yaml(pipeline(mode="streaming")).start().wait(300).folder
    steps = [record for record in timeless(folder) if record["kind"] == "step"]
    assert [(step["step"], step["version"], step["rows"]) for step in steps] == [(1, 3, 16), (2, 4, 16), (3, 5, 16)]
    assert all(step["staleness_max"] == 0 and step["logprob_gap_max"] < 1e-4 for step in steps)
    check_ledger(folder, steps=3)
    check_bound(trained(folder), 0)
    values = json.loads((folder / "summary.json").read_text())
    assert values["ledger"] == {"admitted": 48, "done": 48, "dropped": {}, "live": 0}


@pytest.mark.parametrize(
    ("bound", "policy", "more"),
    [(3, "wait", []), (2, "wait", []), (1, "mask", ["rollout.replicas=2"]), (0, "wait", ["run_ahead=1"])],
)
def test_an_asynchronous_run_keeps_its_bound_and_makes_use_of_it(pipeline, caplog, bound, policy, more):
    train = {"steps": 6, "off_policy": "none" if bound < 3 else "tis"}
    path = pipeline(mode="async", max_staleness=bound, on_stale=policy, train=train, rollout={"max_inflight": 8})
    folder = Flow.from_yaml(path, *more).start().wait(300).folder
    check_ledger(folder, steps=6)
    assert ("the loss has no correction for what is more than a version old" in caplog.text) == (bound == 2)
    rows = trained(folder)
    if policy == "wait":
        check_bound(rows, bound)
        assert all(
            {row["group_id"] // GROUPS for row in rows if row["trained_by"] == WARMUP + step} == {step - 1}
            for step in range(1, 7)
        )
    assert (max(row["staleness"] for row in rows) > 0) == (bound > 0)
    steps = [record for record in timeless(folder) if record["kind"] == "step"]
    assert [step["version"] for step in steps] == list(range(3, 9))
    assert all(step["staleness_max"] <= bound for step in steps)
    check_from_outside(folder, bound)
    assert check_trace(folder) == 96


def log(folder: Path) -> str:
    path = folder / "metrics.jsonl"
    return path.read_text() if path.exists() else ""


LONG = {"mode": "async", "max_staleness": 1, "on_stale": "wait", "train": {"steps": 10}, "eval": {"rows": 0}}


def test_an_asynchronous_run_that_is_stopped_goes_on_where_it_was(pipeline):
    flow = Flow.from_yaml(pipeline(**LONG)).start()
    until(lambda: len(flow.metrics.of("step")) >= 3 or flow.phase == "ended")
    # Rows retire with their step: 5 steps' worth were admitted at the third at least, and those of two are gone.
    assert flow.conductor._tables["train"].ledger().live <= 4 * ROWS
    flow.stop()
    assert not flow.wait(300)["complete"]
    assert Flow.resume(flow.folder).start().wait(300)["complete"]
    check_ledger(flow.folder, steps=10)
    check_bound(trained(flow.folder), 1)
    assert check_trace(flow.folder, parts=2) >= 160


def test_responses_that_are_finished_when_a_run_stops_are_not_generated_again(pipeline):
    """The trainer takes long, so that the responses of its next step are there when the run is stopped."""
    emulated = {
        "rollout": {"backend": "emulated", "max_inflight": 16, "options": {"decode": 0.002, "lengths": {"mean": 4}}},
        "train": {"backend": "emulated", "steps": 6, "options": {"token": 0.004}},
        "reward": {"fn": "char_match"},
    }
    flow = Flow.from_yaml(pipeline(**{**LONG, **emulated})).start()
    until(lambda: len(flow.metrics.of("step")) >= 2 or flow.phase == "ended")
    assert flow.conductor is not None
    until(lambda: flow.conductor.board.served["advantage"] >= 4 * ROWS or flow.phase == "ended")
    flow.stop()
    assert not flow.wait(300)["complete"]
    before = progress(flow.folder / "checkpoint")
    kept = finished.read(flow.folder / "checkpoint" / FINISHED)
    assert kept is not None
    assert len(kept) >= ROWS
    again = Flow.resume(flow.folder).start()
    assert again.wait(300)["complete"]
    assert again.conductor is not None
    # What a replica says last may come too late to be counted.
    assert again.conductor.board.served["rollout"] <= ROWS * (6 - before["step"]) - len(kept)
    check_ledger(flow.folder, steps=6)
    check_bound(trained(flow.folder), 1)
    assert not list(flow.folder.glob(".*.finished"))


def test_a_run_that_is_stopped_while_it_starts_again_keeps_its_place(pipeline):
    flow = Flow.from_yaml(pipeline(**LONG)).start()
    until(lambda: len(flow.metrics.of("step")) >= 2 or flow.phase == "ended")
    flow.stop()
    flow.wait(300)
    before = progress(flow.folder / "checkpoint")
    again = Flow.resume(flow.folder).start()
    until(lambda: again.conductor is not None and "trainer-0" in again.conductor.board.ready)
    again.stop()
    assert not again.wait(300)["complete"]
    after = progress(flow.folder / "checkpoint")
    assert after["admitted"] >= before["admitted"] > 0
    assert after["step"] >= before["step"] > 0
    assert Flow.resume(flow.folder).start().wait(300)["complete"]
    check_ledger(flow.folder, steps=10)


SLOW = """
import time
from asyncflow.stage import stage


@stage(reads=["trained_by"], writes={"extra": "int64"})
def make(batch):
    time.sleep(0.5)
    return {"extra": batch["trained_by"].array}


@stage(reads=["extra"], writes={})
def look(batch):
    time.sleep(0.1)
"""


def test_a_run_stops_though_a_stage_looks_at_what_is_made_late(pipeline, tmp_path):
    (tmp_path / "slow.py").write_text(SLOW)
    stages = [{"fn": "slow.py:make"}, {"fn": "slow.py:look"}]
    flow = Flow.from_yaml(pipeline(**LONG, stages=stages, executor={"wait_timeout": 60})).start()
    until(lambda: len(flow.metrics.of("step")) >= 2 or flow.phase == "ended")
    flow.stop()
    assert not flow.wait(300)["complete"]


def test_an_asynchronous_run_that_is_killed_trains_nothing_twice_and_skips_nothing(pipeline, tmp_path):
    path = pipeline(**LONG, output={"checkpoint_every": 2})
    process, folder = command("run", "--quiet", path), tmp_path / "run"
    behind = '"step": 6, "version"'  # a checkpoint was written, and more was trained
    until(lambda: behind in log(folder) or process.poll() is not None)
    process.kill()
    process.communicate(timeout=300)
    assert nobody_left(process)
    process = command("run", "--quiet", "--resume", path)
    output, _ = process.communicate(timeout=280)
    assert process.returncode == 0, output
    assert "is complete" in command("run", "--resume", path).communicate(timeout=60)[0]
    check_ledger(folder, steps=10)
    check_bound(trained(folder), 1)


LATE = """
import time
from asyncflow.backends.infer.transformers import TransformersEngine


class Late(TransformersEngine):
    \"\"\"Keeps the responses of its second group back until three newer versions are in use.\"\"\"

    def results(self, keys):
        begun, ends = self.version, time.monotonic() + 120
        for finished in super().results(keys):
            while min(keys) == 4 and self.version < begun + 3 and time.monotonic() < ends:
                time.sleep(0.01)
            yield finished
"""


@pytest.fixture
def late(engine):
    engine("late", LATE)


@pytest.mark.usefixtures("late")
@pytest.mark.parametrize(("policy", "reasons"), [("mask", set()), ("drop", {"stale"}), ("requeue", {"requeued"})])
def test_a_group_that_comes_too_late_meets_the_policy(pipeline, policy, reasons):
    changes = {**LONG, "on_stale": policy, "train": {"steps": 6}, "rollout": {"backend": "late"}}
    folder = Flow.from_yaml(pipeline(**changes)).start().wait(300).folder
    ledger = json.loads((folder / "summary.json").read_text())["ledger"]
    dropped = sum(ledger["dropped"].values())
    assert (ledger["done"], ledger["live"], ledger["admitted"]) == (96, 0, 96 + dropped)
    assert set(ledger["dropped"]) == reasons
    rows = trained(folder)
    groups = {row["group_id"] for row in rows}
    lost = set(range(ledger["admitted"] // 4)) - groups
    # On a busy machine weights may come late, too, and then more than that one group is too old.
    assert (len(groups), 4 * len(lost), bool(lost)) == (24, dropped, bool(reasons))
    steps = [record for record in timeless(folder) if record["kind"] == "step"]
    assert sum(step["stale_rows"] for step in steps) >= 4
    assert all(step["staleness_max"] <= 1 for step in steps)
    # Drawn in order: one that is dropped is replaced by the next, and one that is requeued comes again itself.
    drawn = Order(len(WORDS), seed=0).take(24 + len(lost))
    expected = drawn[sorted(groups)] if policy == "drop" else drawn[:24]
    assert {row["prompt_id"] for row in rows} == set(expected.tolist())
