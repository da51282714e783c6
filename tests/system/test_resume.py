"""A run that was stopped or killed goes on to the same end as one that was not, wherever that happened."""

import json
import time
from collections.abc import Callable
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from asyncflow import Flow
from asyncflow.checkpoint import progress
from tests.system.test_ends import command, nobody_left
from tests.system.test_run import timeless

pytestmark = pytest.mark.timeout(1200)  # processes start slowly where cores are shared

MOMENTS: dict[str, Callable[[Flow], bool]] = {
    "first evaluation": lambda flow: flow.phase == "evaluating before",
    "warm-up": lambda flow: bool(flow.metrics.of("warmup")),
    "training": lambda flow: len(flow.metrics.of("step")) >= 2,
    "last evaluation": lambda flow: flow.phase == "evaluating after",
}
RUN = {
    "warmup": {"steps": 6, "rows_per_step": 4},
    "train": {"steps": 8, "kl_coef": 0.1},
    "output": {"samples_every": 3, "checkpoint_every": 3},
}


def until(what: Callable[[], bool], seconds: float = 300.0) -> None:
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def samples(folder: Path) -> dict[str, list[dict[str, object]]]:
    return {path.name: pq.read_table(path).to_pylist() for path in sorted((folder / "samples").glob("*.parquet"))}


def same(one: Path, other: Path) -> None:
    assert timeless(one) == timeless(other)
    assert samples(one) == samples(other)
    ours, theirs = (json.loads((folder / "summary.json").read_text()) for folder in (one, other))
    assert ours["complete"]
    assert theirs["complete"]
    assert ours["version"] == theirs["version"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> list[Path]:
    """Folder of an uninterrupted run, made once."""
    return [tmp_path_factory.mktemp("uninterrupted")]


def uninterrupted(path: Path, whole: list[Path]) -> Path:
    folder = whole[0] / "run"
    if not folder.exists():
        Flow.from_yaml(path, f"output.folder={folder}").start().wait(300)
    return folder


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_run_stopped_at_any_moment_goes_on_to_the_same_end(pipeline, whole, moment):
    path = pipeline(**RUN)
    flow = Flow.from_yaml(path).start()
    until(lambda: MOMENTS[moment](flow) or flow.phase == "ended")
    flow.stop()
    assert not flow.wait(300)["complete"]
    assert Flow.resume(flow.folder).start().wait(300)["complete"]
    same(flow.folder, uninterrupted(path, whole))


def test_a_killed_run_takes_its_replicas_with_it_and_goes_on_from_its_newest_checkpoint(pipeline, whole, tmp_path):
    path = pipeline(**RUN)
    reference = uninterrupted(path, whole)
    process = command("run", "--quiet", path)
    folder = tmp_path / "run"
    until(lambda: (folder / "checkpoints" / "step-000003").exists() or process.poll() is not None)
    process.kill()
    process.communicate(timeout=300)
    assert nobody_left(process)
    assert not (folder / "summary.json").exists()
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "step", "ver')  # what a kill in the middle of a line leaves
    process = command("resume", folder)
    output, _ = process.communicate(timeout=280)
    assert process.returncode == 0, output
    same(folder, reference)
    assert sorted(entry.name for entry in (folder / "checkpoints").iterdir())[-1] == "step-000006"
    assert progress(folder / "checkpoint")["step"] == 8


def test_the_reference_is_the_model_that_the_warm_up_left(pipeline, whole):
    from safetensors.torch import load_file

    folder = uninterrupted(pipeline(**RUN), whole)
    steps = [record for record in timeless(folder) if record["kind"] == "step"]
    assert steps[0]["kl"] == pytest.approx(0, abs=1e-6)
    assert steps[-1]["kl"] > 1e-6
    kept = progress(folder / "reference")
    assert (kept["step"], kept["warmups"], kept["version"]) == (0, 6, 6)
    ours, last = (load_file(folder / name / "model.safetensors") for name in ("reference", "checkpoint"))
    assert any((ours[key] != last[key]).any() for key in ours)
