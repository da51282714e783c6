"""The whole tree of processes killed, again and again: in every mode and with every policy the run goes on."""

import os
import random
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from asyncflow.data.order import Order
from tests.system.conftest import WORDS
from tests.system.test_ends import command, nobody_left
from tests.system.test_modes import GROUPS, ROWS, late, log, trained
from tests.system.test_resume import samples, until
from tests.system.test_run import timeless

__all__ = ["late"]

pytestmark = pytest.mark.timeout(1200)  # processes start slowly where cores are shared

STEPS = 6


def steps(folder: Path) -> int:
    return log(folder).count('"kind": "step"')


def being_written(folder: Path) -> bool:
    return any((folder / "checkpoints").glob(".step-*.partial"))


def moments(folder: Path) -> dict[str, Callable[[], bool]]:
    """When to kill: before there is a checkpoint, while one is written, and after a step or two more."""
    before = steps(folder)
    return {
        "no checkpoint yet": lambda: steps(folder) == 0 and (folder / "metrics.jsonl").exists(),
        "a checkpoint is being written": lambda: being_written(folder),
        "more was trained": lambda: steps(folder) > before,
    }


def killed(path: Path, moment: Callable[[], bool], after: float) -> subprocess.Popen[str]:
    """Run until a moment, and some seconds more, and kill every process of it at once."""
    process = command("run", "--quiet", "--resume", path)
    until(lambda: moment() or process.poll() is not None)
    time.sleep(after)
    assert process.poll() is None, process.communicate()[0]
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate(timeout=300)
    assert nobody_left(process)
    return process


@pytest.mark.usefixtures("late")
@pytest.mark.parametrize("mode", ["separated", "streaming", "mask", "drop", "requeue"])
def test_what_is_killed_skips_nothing_and_trains_nothing_twice(pipeline, tmp_path, mode):
    policy = {} if mode in ("separated", "streaming") else {"on_stale": mode, "max_staleness": 1}
    backend = {"rollout": {"backend": "late"}} if policy else {}
    path = pipeline(
        mode="async" if policy else mode,
        train={"steps": STEPS},
        eval={"rows": 0},
        output={"checkpoint_every": 1},
        **policy,
        **backend,
    )
    folder, chance = tmp_path / "run", random.Random(mode)
    for name in moments(folder):
        after = 0.0 if name == "a checkpoint is being written" else chance.uniform(0.0, 0.3)
        killed(path, moments(folder)[name], after)
    process = command("run", "--quiet", "--resume", path)
    output, _ = process.communicate(timeout=280)
    assert process.returncode == 0, output
    rows = trained(folder) if mode != "separated" else [row for step in samples(folder).values() for row in step]
    assert len({(row["group_id"], row["rollout_id"]) for row in rows}) == len(rows) == ROWS * STEPS
    prompts = {row["group_id"]: row["prompt_id"] for row in rows}
    assert len(prompts) == GROUPS * STEPS
    drawn = Order(len(WORDS), seed=0).take(max(prompts) + 1).tolist()
    if mode == "drop":
        lost = set(range(max(prompts) + 1)) - set(prompts)
        assert GROUPS * len(lost) <= sum(step["stale_rows"] for step in timeless(folder) if step["kind"] == "step")
        assert all(drawn[group] == prompt for group, prompt in prompts.items())
    else:
        assert sorted(prompts.values()) == sorted(drawn[: GROUPS * STEPS])
    if policy and mode != "mask":
        assert all(row["staleness"] <= 1 and row["trained_by"] - 1 - min(row["versions"]) <= 1 for row in rows)
