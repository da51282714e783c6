"""Evaluation beside training: what goes on meanwhile, by which weights it is answered, and that nothing is missing."""

import json
from collections import Counter
from pathlib import Path

import pytest

from asyncflow import Flow
from tests.system.test_failures import kill, steps
from tests.system.test_resume import until
from tests.system.test_run import timeless

pytestmark = pytest.mark.timeout(1200)  # processes start slowly where cores are shared

HOLDS = """
import json
import time
from pathlib import Path

from asyncflow.backends.infer.transformers import TransformersEngine

COOL = 0.5


class Holds(TransformersEngine):
    \"\"\"Keeps held-out responses back until it may go on, but not by the first weights; logs all versions.\"\"\"

    def submit(self, requests):
        self.cool = getattr(self, "cool", set()) | {one.key for one in requests if one.sampling.temperature == COOL}
        super().submit(requests)

    def results(self, keys):
        ends = time.monotonic() + 120
        for finished in super().results(keys):
            cool = [one for one in finished if one.key in self.cool]
            while cool and self.version > 0 and not Path("go").exists() and time.monotonic() < ends:
                time.sleep(0.01)
            with Path("versions").open("a") as file:
                file.writelines(json.dumps(one.versions.tolist()) + chr(10) for one in cool)
            yield finished
"""


@pytest.fixture
def holds(tmp_path, engine) -> Path:
    """Return the folder that the engine runs in."""
    engine("holds", HOLDS)
    return tmp_path


RUN = {
    "warmup": None,
    "rollout": {"backend": "holds", "max_inflight": 8},
    "eval": {"rows": 6, "every": 2, "samples": 2, "k": [1, 2], "temperature": 0.5},
    "train": {"steps": 7},
}


def check(folder: Path, moments: list[str]) -> list[dict[str, object]]:
    """Every evaluation has all rows, and all of their tokens are of the version that its record names."""
    records = [record for record in timeless(folder) if record["kind"] == "eval"]
    assert [record["moment"] for record in records] == moments
    assert all((record["prompts"], record["rows"], record["rows_dropped"]) == (6, 12, 0) for record in records)
    assert all(0 <= record["pass@1"] <= record["pass@2"] <= 1 for record in records)
    assert [record["version"] for record in records] == sorted(record["version"] for record in records)
    return records


def overlapped(flow: Flow, bound: int) -> int:
    """Wait until training has gone as far as it may while the first evaluation beside it holds the engines."""
    until(lambda: flow.phase in ("training", "ended"))
    until(lambda: flow.conductor.board.pinned is not None or flow.phase == "ended")
    pinned = flow.conductor.board.pinned
    steps(flow, pinned + bound + 1)
    assert flow.conductor.board.pinned == pinned, "the engines are still held"
    assert [record["moment"] for record in flow.metrics.of("eval")] == ["before"]
    return pinned


@pytest.mark.parametrize(
    ("mode", "bound", "killed"), [("async", 1, False), ("async", 1, True), ("streaming", 0, False)]
)
def test_training_goes_on_beside_an_evaluation_as_far_as_the_bound_allows(pipeline, holds, mode, bound, killed):
    flow = Flow.from_yaml(pipeline(mode=mode, **RUN)).start()
    pinned = overlapped(flow, bound)
    if killed:
        kill(flow, "rollout-0")
    (holds / "go").touch()
    summary = flow.wait(600)
    records = check(flow.folder, ["before", "step_2", "step_4", "step_6", "after"])
    assert records[1]["version"] == pinned
    assert summary["ledger"] == {"admitted": 112, "done": 112, "dropped": {}, "live": 0}
    assert summary["restarts"] == ({"rollout-0": 1} if killed else {})
    assert all(record["staleness_max"] <= bound for record in timeless(flow.folder) if record["kind"] == "step")
    order = [(record["kind"], record.get("step")) for record in timeless(flow.folder)]
    assert order.index(("step", pinned + bound + 1)) < order.index(("eval", 2)), "steps were made meanwhile"
    lines = [json.loads(line) for line in (holds / "versions").read_text().splitlines()]
    assert all(len(set(versions)) == 1 for versions in lines)
    expected = [record["version"] for record in records for _ in range(12)]
    assert Counter(versions[0] for versions in lines) == Counter(expected)


def test_a_run_that_is_stopped_in_an_evaluation_makes_up_for_it(pipeline, holds):
    flow = Flow.from_yaml(pipeline(mode="async", **RUN)).start()
    overlapped(flow, 1)
    flow.stop()
    (holds / "go").touch()
    assert not flow.wait(600)["complete"]
    assert Flow.resume(flow.folder).start().wait(600)["complete"]
    moments = [record["moment"] for record in timeless(flow.folder) if record["kind"] == "eval"]
    assert moments[0] == "before"
    assert moments[-2:] == ["step_6", "after"]
    assert len(moments) == len(set(moments)) >= 4
    check(flow.folder, moments)
