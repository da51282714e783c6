"""One process at a time has a run's folder, and one that is gone has it no more."""

import os
import subprocess
import sys

import pytest

from asyncflow.errors import CheckpointError
from asyncflow.flow import Flow
from asyncflow.lock import Lock

HOLD = "import sys, time; from pathlib import Path; from asyncflow.lock import Lock; lock = Lock(Path(sys.argv[1])); "


def test_what_is_held_is_refused_with_the_process_that_holds_it_until_it_lets_go(tmp_path):
    lock = Lock(tmp_path)
    with pytest.raises(CheckpointError, match=f"still going, in process {os.getpid()}: wait for its end"):
        Lock(tmp_path)
    lock.close()
    lock.close()
    Lock(tmp_path).close()


def test_a_process_that_is_killed_holds_nothing(tmp_path):
    command = [sys.executable, "-c", HOLD + "print('held', flush=True); time.sleep(600)", str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        with pytest.raises(CheckpointError, match=f"in process {process.pid}"):
            Lock(tmp_path)
        process.kill()
        process.wait(30)
        Lock(tmp_path).close()


def test_a_folder_that_cannot_be_written_into_is_told_and_one_that_holds_no_run_is_left_as_it_is(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="file cannot be written into: Not a directory"):
        Lock(tmp_path / "file")
    with pytest.raises(CheckpointError, match="holds no run"):
        Flow.resume(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_run_that_goes_on_is_not_resumed_beside_itself(tmp_path):
    (tmp_path / "config.yaml").touch()
    (tmp_path / "checkpoint").mkdir()
    (tmp_path / "checkpoint" / "progress.json").write_text('{"format": 1, "version": 1, "step": 1}')
    lock = Lock(tmp_path)
    with pytest.raises(CheckpointError, match="still going"):
        Flow.resume(tmp_path)
    lock.close()
