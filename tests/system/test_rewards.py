"""Runs whose reward function hangs, raises and abstains: every such row has its outcome, and the run goes on."""

import logging

import numpy as np
import pyarrow.parquet as pq
import pytest

from asyncflow import Flow
from asyncflow.errors import DataError, ReplicaFailed

pytestmark = pytest.mark.timeout(1200)  # processes start slowly where cores are shared

FUNCTION = """
import multiprocessing
import time
from pathlib import Path

with Path(__file__).with_name("importers").open("a") as file:
    file.write(multiprocessing.current_process().name + chr(10))


def fickle(response, word):
    if word == "mug":
        time.sleep(600)
    kind = sum(map(ord, response)) % 4
    if kind == 0:
        raise ValueError(f"no good: {word}")
    return None if kind == 1 else sum(map(ord, response)) / 1000


def broken(response):
    return response.no_such_thing


def mute(response):
    return None
"""


@pytest.fixture
def run(pipeline, tmp_path):
    """A run with one of the functions, and with some choices."""
    (tmp_path / "fickle.py").write_text(FUNCTION)

    def flow(function, **choices):
        reward = {"fn": f"fickle.py:{function}", "timeout": "500ms", **choices}
        return Flow.from_yaml(pipeline(reward=reward, train={"algorithm": "dr_grpo"}, warmup=None, eval={"rows": 4}))

    return flow


def rows(folder):
    """Of each row in the samples: group, reward, outcome, advantage."""
    tables = [pq.read_table(path) for path in sorted((folder / "samples").iterdir())]
    columns = ("group_id", "reward", "reward_outcome", "advantage")
    return [row for table in tables for row in zip(*(table[name].to_pylist() for name in columns), strict=True)]


def test_rows_without_a_score_leave_their_groups_and_the_function_stays_in_its_own_processes(run, tmp_path, caplog):
    flow = run("fickle").start()
    summary = flow.wait(600)
    dropped = summary["ledger"]["dropped"]
    assert set(dropped) == {"reward_timeout", "reward_error", "reward_unscored"}
    counted = {key: sum(step[key] for step in flow.metrics.of("step")) for key in dropped}
    assert counted == dropped
    found = rows(flow.folder)
    assert {outcome for _, _, outcome, _ in found} == {"ok"}
    sizes = check_baselines(found)
    assert min(sizes) < 4 < sum(sizes)
    assert summary["reward/workers_replaced"] >= dropped["reward_timeout"] > 0
    importers = (tmp_path / "importers").read_text().split()
    assert all(name.startswith("asyncflow-reward-") for name in importers), importers
    assert len(importers) == 1 + summary["reward/workers_replaced"]
    (first,) = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING and "error:" in r.getMessage()]
    assert 'raise ValueError(f"no good: {word}")' in first


def check_baselines(found):
    """Advantages of a group add up to zero over the rows that stayed; return how many these are in each group."""
    sizes = []
    for group in {group for group, *_ in found}:
        rewards = np.array([reward for other, reward, _, _ in found if other == group])
        advantages = [advantage for other, *_, advantage in found if other == group]
        assert advantages == pytest.approx(rewards - rewards.mean())
        sizes.append(len(rewards))
    return sizes


def test_a_zero_by_choice_keeps_the_row_and_shows_in_samples_steps_and_evaluations(run):
    flow = run("fickle", on_timeout="zero", on_error="zero", on_unscored="zero").start()
    summary = flow.wait(600)
    assert summary["ledger"] == {"admitted": 48, "done": 48, "dropped": {}, "live": 0}
    found = rows(flow.folder)
    for outcome in ("timeout", "error", "unscored"):
        own = [reward for _, reward, other, _ in found if other == outcome]
        assert set(own) == {0.0}
        assert sum(step[f"reward_{outcome}"] for step in flow.metrics.of("step")) == len(own)
    evals = flow.metrics.of("eval")
    assert all(record["rows"] == 4 for record in evals)
    assert sum(record["reward_error"] + record["reward_unscored"] for record in evals) > 0


def test_a_function_that_is_broken_ends_the_run_with_its_traceback(run):
    with pytest.raises(ReplicaFailed, match=r"(?s)not one response could be scored.*return response\.no_such_thing"):
        run("broken").start().wait(600)


def test_a_function_that_never_scores_ends_the_run_with_what_became_of_the_rows(run):
    flow = run("mute").start()
    with pytest.raises(DataError, match=r"(?s)cannot be filled.*reward_unscored: \d+.*function returned None"):
        flow.wait(600)
    (record,) = flow.metrics.of("eval")
    assert (record["rows"], record["rows_dropped"], record["reward_unscored"]) == (0, 4, 4)
