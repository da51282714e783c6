"""How a run ends: finished, interrupted, killed, or by the user's own mistake; never with a process left behind."""

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from asyncflow import Flow
from asyncflow.errors import AsyncflowError
from tests.system.test_run import timeless

pytestmark = pytest.mark.timeout(1200)  # processes start slowly where cores are shared


def command(*arguments: object) -> subprocess.Popen[str]:
    """Start the command line in a session of its own, so that signals to its group do not reach the tests."""
    return subprocess.Popen(
        [sys.executable, "-m", "asyncflow", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def until(process: subprocess.Popen[str], text: str) -> str:
    """Read the output up to a line that holds a text."""
    seen = ""
    assert process.stdout is not None
    for line in process.stdout:
        seen += line
        if text in line:
            return seen
    raise AssertionError(f"ended with {process.wait()} without {text!r}:\n{seen}")


def group(process: subprocess.Popen[str]) -> list[int]:
    """Processes of the command's session that are alive."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except (FileNotFoundError, ProcessLookupError):
                continue
            if int(fields[3]) == process.pid and fields[0] != "Z":
                found.append(int(entry.name))
    return found


def nobody_left(process: subprocess.Popen[str], seconds: float = 60.0) -> bool:
    deadline = time.monotonic() + seconds
    while group(process) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not group(process)


def test_an_interrupted_run_goes_on_to_the_same_end_as_an_uninterrupted_one(pipeline, tmp_path):
    path = pipeline(train={"steps": 20}, eval={"rows": 4}, warmup=None)
    whole = Flow.from_yaml(path, f"output.folder={tmp_path / 'whole'}").start().wait(300)

    process = command("run", path)
    until(process, "step 5/20")
    os.killpg(process.pid, signal.SIGINT)
    output, _ = process.communicate(timeout=280)
    assert process.returncode == 130, output
    assert "asyncflow resume" in output
    assert nobody_left(process)
    folder = tmp_path / "run"
    interrupted = json.loads((folder / "summary.json").read_text())
    assert not interrupted["complete"]
    assert interrupted["steps"] < 20

    assert Flow.resume(folder).start().wait(300)["complete"]
    assert timeless(folder) == timeless(whole.folder)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("def first_letter(response, word):\n    return 1 / 0\n", "ZeroDivisionError"),
        ("def first_letter(response, wrod):\n    return 1.0\n", "wrod"),
    ],
)
def test_a_mistake_in_the_reward_ends_the_run_with_its_message(pipeline, tmp_path, source, message):
    path = pipeline(warmup=None)
    (tmp_path / "rewards.py").write_text(source)
    with pytest.raises(AsyncflowError, match=message):
        Flow.from_yaml(path).start().wait(280)
    assert multiprocessing.active_children() == []


def test_a_prompt_file_with_a_bad_line_is_named_with_the_line(pipeline, tmp_path):
    path = pipeline()
    with (tmp_path / "words.jsonl").open("a") as file:
        file.write("{not json\n")
    process = command("run", path)
    output, _ = process.communicate(timeout=280)
    assert process.returncode == 1, output
    assert "words.jsonl:31" in output
    assert nobody_left(process)
