"""Runs in which every order follows the rows: each mode gives the same numbers, also after a kill."""

import pytest

from asyncflow import Flow
from tests.system.test_ends import command
from tests.system.test_resume import until
from tests.system.test_run import timeless

pytestmark = pytest.mark.timeout(1200)

RUN = {
    "deterministic": True,
    "warmup": {"steps": 2, "rows_per_step": 4},
    "train": {"steps": 5, "kl_coef": 0.1},
    "reward": {"fn": "picky.py:picky"},
    "eval": {"rows": 2, "every": 3},
    "output": {"samples_every": 0, "checkpoint_every": 2},
}
PICKY = """
def picky(response, word):
    if word[0] == "d" or len(set(response)) == 1:
        raise ValueError("no score for these")
    return len(set(response)) + ord(response[:1] or "a") / 100
"""
"""Loses whole groups and single rows, and comes to its verdict late for some."""


def test_colocated_and_streaming_give_the_same_numbers_and_so_does_a_run_that_was_killed(pipeline, tmp_path):
    (tmp_path / "picky.py").write_text(PICKY)
    path = pipeline(**RUN)
    colocated = timeless(Flow.from_yaml(path).start().wait(600).folder)
    assert sum(record.get("rows_dropped", 0) for record in colocated) > 8, "the test needs groups that are lost"
    folder = tmp_path / "streaming"
    process = command("run", "--quiet", path, "mode=streaming", f"output.folder={folder}")
    until(lambda: (folder / "checkpoints" / "step-000002").exists() or process.poll() is not None)
    process.kill()
    process.communicate(timeout=300)
    process = command("resume", folder)
    output, _ = process.communicate(timeout=600)
    assert process.returncode == 0, output
    streaming = timeless(folder)
    assert [record["kind"] for record in streaming] == [record["kind"] for record in colocated]
    for mine, theirs in zip(streaming, colocated, strict=True):
        assert mine == theirs
