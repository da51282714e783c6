"""Every example runs, with fewer steps than it is written for."""

import importlib.util
from pathlib import Path

import pytest
import yaml

from asyncflow import Flow

pytestmark = pytest.mark.timeout(1200)  # processes start slowly where cores are shared

EXAMPLES = Path(__file__).parent.parent.parent / "examples"
SHORT = ("warmup.steps=2", "train.steps=2", "train.prompts_per_step=4", "executor.threads=1")


def test_there_is_a_test_for_each_example():
    files = {path.relative_to(EXAMPLES).as_posix() for path in EXAMPLES.rglob("*") if path.suffix in (".py", ".yaml")}
    assert files == {
        "quickstart.yaml",
        "plurals/pipeline.yaml",
        "plurals/rewards.py",
        "from_python.py",
        "check_staleness.py",  # tests/system/test_modes.py
    }


@pytest.mark.parametrize("name", ["quickstart.yaml", "plurals/pipeline.yaml"])
def test_an_example_runs(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    summary = Flow.from_yaml(EXAMPLES / name, *SHORT, f"output.folder={tmp_path / 'run'}").start().wait(300)
    assert summary["complete"]
    assert summary["steps"] == 2
    assert yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())["train"]["steps"] == 2


def test_the_python_example_runs(tmp_path, capsys):
    spec = importlib.util.spec_from_file_location("from_python", EXAMPLES / "from_python.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.main(*SHORT, f"output.folder={tmp_path / 'run'}")
    assert "accuracy" in capsys.readouterr().out
