"""How a run ends: finished, interrupted, killed, or by the user's own mistake; never with a process left behind."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from asyncflow import Flow
from tests.system.test_run import timeless

pytestmark = pytest.mark.timeout(600)  # processes start slowly where cores are shared


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


def named(process: subprocess.Popen[str], what: str) -> int:
    """The child process that maps a library (the engines are the children with torch)."""
    for pid in group(process):
        if pid != process.pid and what in Path(f"/proc/{pid}/maps").read_text():
            return pid
    raise AssertionError(f"no child of {process.pid} maps {what}")


def nobody_left(process: subprocess.Popen[str], seconds: float = 10.0) -> bool:
    deadline = time.monotonic() + seconds
    while group(process) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not group(process)


def test_an_interrupted_run_goes_on_to_the_same_end_as_an_uninterrupted_one(pipeline, tmp_path):
    path = pipeline(train={"steps": 40}, eval={"rows": 4}, warmup=None)
    whole = Flow.from_yaml(path, f"output.folder={tmp_path / 'whole'}").start().wait(300)

    process = command("run", path)
    until(process, "step 5/40")
    os.killpg(process.pid, signal.SIGINT)
    output, _ = process.communicate(timeout=280)
    assert process.returncode == 130, output
    assert "asyncflow resume" in output
    assert nobody_left(process)
    folder = tmp_path / "run"
    interrupted = json.loads((folder / "summary.json").read_text())
    assert not interrupted["complete"]
    assert interrupted["steps"] < 40

    process = command("resume", folder)
    output, _ = process.communicate(timeout=280)
    assert process.returncode == 0, output
    assert timeless(folder) == timeless(whole.folder)
    assert nobody_left(process)


def test_a_killed_engine_ends_the_run_with_its_name_and_a_failure(pipeline):
    process = command("run", pipeline(train={"steps": 500}))
    until(process, "step 12/500")
    os.kill(named(process, "libtorch"), signal.SIGKILL)
    output, _ = process.communicate(timeout=280)
    assert process.returncode == 1, output
    assert "ended by signal SIGKILL" in output
    assert "rollout-0" in output or "trainer-0" in output
    assert nobody_left(process)


def test_a_killed_main_process_takes_its_replicas_with_it(pipeline):
    process = command("run", pipeline(train={"steps": 500}))
    until(process, "step 12/500")
    process.kill()
    process.communicate(timeout=280)
    assert nobody_left(process)


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
    process = command("run", path)
    output, _ = process.communicate(timeout=280)
    assert process.returncode == 1, output
    assert message in output
    assert nobody_left(process)


def test_a_prompt_file_with_a_bad_line_is_named_with_the_line(pipeline, tmp_path):
    path = pipeline()
    with (tmp_path / "words.jsonl").open("a") as file:
        file.write("{not json\n")
    process = command("run", path)
    output, _ = process.communicate(timeout=280)
    assert process.returncode == 1, output
    assert "words.jsonl:31" in output
    assert nobody_left(process)
