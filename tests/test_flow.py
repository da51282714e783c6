"""What a flow refuses before it starts, and which checkpoint a resume takes."""

import json

import pytest

from asyncflow.config.load import load
from asyncflow.config.schema import dump
from asyncflow.errors import AsyncflowError, CheckpointError, ConfigError
from asyncflow.flow import Flow, is_complete, last_run, newest_checkpoint


def checkpoint(folder, version: int, **more: object) -> None:
    folder.mkdir(parents=True)
    (folder / "progress.json").write_text(json.dumps({"format": 1, "version": version, "step": version, **more}))


def test_one_that_is_damaged_is_left_aside_if_there_is_another(tmp_path, caplog):
    for step, text in ((5, '{"format": 1, "version": 5, "step": 5}'), (6, '{"format": 1, "ver')):
        path = tmp_path / "checkpoints" / f"step-{step:06d}"
        path.mkdir(parents=True)
        (path / "progress.json").write_text(text)
    assert newest_checkpoint(tmp_path).name == "step-000005"
    assert "step-000006/progress.json is damaged" in caplog.text
    (tmp_path / "checkpoints" / "step-000005" / "progress.json").unlink()
    with pytest.raises(CheckpointError, match="is damaged"):
        newest_checkpoint(tmp_path)


def test_the_newest_checkpoint_counts_and_unfinished_ones_do_not(tmp_path):
    checkpoint(tmp_path / "checkpoint", 4)
    checkpoint(tmp_path / "checkpoints" / "step-000007", 7)
    checkpoint(tmp_path / "checkpoints" / ".step-000009.123.partial", 9)
    assert newest_checkpoint(tmp_path) == tmp_path / "checkpoints" / "step-000007"


SETTINGS = {
    "model": {"config": {"model_type": "llama"}, "tokenizer": "characters"},
    "data": {"source": "python"},
    "reward": {"fn": "exact_match"},
}


def begun(folder, **changes):
    """A folder of a run, with settings of its own; the same settings."""
    config = load([], base={**SETTINGS, "output": str(folder), **changes}).pipeline
    folder.mkdir(exist_ok=True)
    (folder / "config.yaml").write_text(dump(config))
    return config


def test_the_last_run_is_gone_on_with(tmp_path):
    config = begun(tmp_path / "run")
    begun(tmp_path / "run-2", output=str(tmp_path / "run"))
    assert Flow.go_on(config).folder == tmp_path / "run-2", "there is nothing yet: it is begun again"
    checkpoint(tmp_path / "run-2" / "checkpoint", 4)
    flow = Flow.go_on(config)
    assert (flow.folder, flow.config) == (tmp_path / "run-2", config)
    assert Flow(config).folder == tmp_path / "run-3"


def test_a_run_of_other_settings_is_not_gone_on_with(tmp_path):
    begun(tmp_path / "run", train={"lr": 0.5})
    changed = load([], base={**SETTINGS, "output": str(tmp_path / "run"), "train": {"lr": 0.25}}).pipeline
    assert Flow.go_on(changed).folder == tmp_path / "run-2", "there is nothing yet that would be lost"
    checkpoint(tmp_path / "run" / "checkpoint", 4)
    with pytest.raises(ConfigError, match=r"begun with other settings: train\.lr 0\.5, now 0\.25\. Go on as it was"):
        Flow.go_on(changed)


def test_where_no_run_was_begun_one_is(tmp_path):
    config = load([], base={**SETTINGS, "output": str(tmp_path / "run")}).pipeline
    assert last_run(tmp_path / "run") is None
    assert Flow.go_on(config).folder == tmp_path / "run"


def test_a_folder_without_a_run_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match=r"holds no run$"):
        Flow.resume(tmp_path)
    begun(tmp_path)
    assert newest_checkpoint(tmp_path) is None
    assert Flow.resume(tmp_path).folder == tmp_path


def test_a_run_that_begins_again_keeps_nothing_of_its_first_attempt(tmp_path):
    begun(tmp_path)
    (tmp_path / "reference").mkdir()
    (tmp_path / "metrics.jsonl").write_text('{"kind": "warmup", "version": 3}\n')
    flow = Flow.resume(tmp_path, dataset=[])
    with pytest.raises(AsyncflowError):  # there is no prompt to begin with
        flow.start().wait(60)
    assert not (tmp_path / "reference").exists()
    assert flow.records == []


@pytest.mark.parametrize("damage", ["", "{", '{"format": 99}', "[]", '{"format": 1}', '{"format": 1, "version": "x"}'])
def test_a_damaged_or_foreign_checkpoint_is_refused(tmp_path, damage):
    checkpoint(tmp_path / "checkpoint", 4)
    (tmp_path / "checkpoint" / "progress.json").write_text(damage)
    with pytest.raises(CheckpointError):
        newest_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("text", "complete"), [("{", False), ("{}", False), ("[]", False), ('{"complete": true}', True)]
)
def test_a_run_is_complete_only_if_its_summary_says_so(tmp_path, text, complete):
    (tmp_path / "summary.json").write_text(text)
    assert is_complete(tmp_path) == complete


def test_an_unknown_backend_is_refused_with_those_there_are(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data.jsonl").write_text('{"prompt": "a", "answer": "b"}\n')
    (tmp_path / "p.yaml").write_text(
        "model: {config: {model_type: qwen2}, tokenizer: characters}\ndata: {source: 'jsonl:data.jsonl'}\n"
        "reward: {fn: exact_match}\nrollout: {backend: vlm}\n"
    )
    with pytest.raises(ConfigError, match="infer backend 'vlm' does not exist; there are emulated, transformers"):
        Flow.from_yaml("p.yaml")
