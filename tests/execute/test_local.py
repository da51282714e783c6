"""Replicas of a real executor that die, as processes and as threads."""

import os
import signal
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from asyncflow.execute.local import LocalExecutor
from asyncflow.execute.messages import Failed, Finished, Ready
from asyncflow.execute.replica import Assignment
from asyncflow.pipeline import StageSpec, Take
from asyncflow.storage import Batch, Schema, TransferQueue
from tests.test_serve import CONFIG

pytestmark = pytest.mark.timeout(600)  # processes start slowly where cores are shared

SECONDS = 300


def once(batch: Batch, folder: str) -> dict[str, object]:
    """Die half-way through the first batch that this gets, in whichever way the folder says."""
    how = Path(folder) / "how"
    if how.exists():
        what = how.read_text()
        how.unlink()
        if what == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        raise MemoryError(what)
    return {"y": batch["x"].array}


class Watched:
    """Takes what an executor reports, and says how often a replica may begin again."""

    def __init__(self, most: int) -> None:
        self.most, self.events, self.failures = most, [], []
        self.changed = threading.Condition()

    def report(self, replica: str, event: object) -> None:
        with self.changed:
            self.events.append(event)
            self.changed.notify_all()

    def fell(self, replica: str, failed: Failed) -> int:
        with self.changed:
            self.failures.append(failed)
            self.changed.notify_all()
            return 0 if failed.final or len(self.failures) > self.most else len(self.failures)

    def until(self, what) -> None:
        with self.changed:
            assert self.changed.wait_for(what, SECONDS)


@pytest.mark.parametrize(("host", "how"), [("other", "kill"), ("other", "raise"), (None, "raise")])
def test_a_replica_that_dies_begins_again_and_its_rows_come_again_at_once(tmp_path, host, how):
    (tmp_path / "how").write_text(how)
    options = {"folder": str(tmp_path)}
    build = "tests.execute.test_local:once"
    spec = StageSpec("once", ("x",), {"y": "int64"}, build=build, host=host, options=options, take=Take(rows=4))
    watched, started = Watched(1), time.monotonic()
    with TransferQueue.open() as queue:
        executor = LocalExecutor(queue, watched.report, watched.fell)
        table = queue.create_table("train", Schema({"x": "int64", "y": "int64"}))
        table.task("once", ("x",), lease_seconds=100_000)
        table.put(Batch({"x": np.arange(8)}))
        table.seal()
        executor.start([Assignment("once-0", (spec,), CONFIG, tmp_path)])
        watched.until(lambda: any(isinstance(event, Finished) for event in watched.events))
        assert executor.stop(SECONDS) == []
        assert table.ledger().done == 8
    assert time.monotonic() - started < 2 * SECONDS
    (failed,) = watched.failures
    assert ("SIGKILL" if how == "kill" else "MemoryError: raise") in failed.report
    assert sum(isinstance(event, Ready) for event in watched.events) == 2


def test_a_replica_that_nobody_wants_again_stays_away_and_its_failure_is_told_once(tmp_path):
    (tmp_path / "how").write_text("raise")
    options = {"folder": str(tmp_path)}
    spec = StageSpec("once", ("x",), {"y": "int64"}, build=f"{__name__}:once", options=options, take=Take(rows=4))
    watched = Watched(0)
    with TransferQueue.open() as queue:
        executor = LocalExecutor(queue, watched.report, watched.fell)
        table = queue.create_table("train", Schema({"x": "int64", "y": "int64"}))
        table.task("once", ("x",))
        table.put(Batch({"x": np.arange(4)}))
        executor.start([Assignment("once-0", (spec,), CONFIG, tmp_path)])
        watched.until(lambda: watched.failures)
        assert executor.stop(SECONDS) == []
        assert table.status().tasks["once"].waiting == 4
    assert len(watched.failures) == 1
