"""A checkpoint is whole or none, whatever the writing of it meets."""

import os
from pathlib import Path

import pytest
import torch

from asyncflow import checkpoint
from asyncflow.errors import CheckpointError
from asyncflow.flow import checkpoints, newest_checkpoint


class Engine:
    """What a checkpoint reads of a training engine, and what it brings back."""

    def __init__(self, version: int) -> None:
        self.version, self.loaded = version, None

    def snapshot(self):
        return lambda folder: (folder / "weights").write_text(str(self.version))

    def state(self):
        return {"version": torch.tensor(self.version)}

    def load_state(self, state):
        self.loaded = int(state["version"])


class Names:
    def save_pretrained(self, folder: Path) -> None:
        (folder / "tokenizer.json").write_text("{}")


def save(folder: Path, version: int) -> None:
    checkpoint.snapshot(Engine(version), Names(), {"step": version})(folder)


def test_what_was_saved_comes_back(tmp_path):
    save(tmp_path / "checkpoint", 3)
    assert checkpoint.progress(tmp_path / "checkpoint") == {"format": 1, "version": 3, "step": 3}
    engine = Engine(0)
    checkpoint.load_engine(tmp_path / "checkpoint", engine)
    assert engine.loaded == 3


def test_a_copy_is_taken_at_once_and_written_later(tmp_path):
    engine = Engine(1)
    write = checkpoint.snapshot(engine, Names(), {"step": 1})
    engine.version = 2
    write(tmp_path / "checkpoint")
    assert checkpoint.progress(tmp_path / "checkpoint")["version"] == 1


def test_a_critic_lies_in_a_folder_inside_and_comes_back_by_itself(tmp_path):
    checkpoint.snapshot(Engine(3), Names(), {"step": 3}, Engine(2))(tmp_path / "checkpoint")
    inside = tmp_path / "checkpoint" / checkpoint.CRITIC
    assert ((tmp_path / "checkpoint" / "weights").read_text(), (inside / "weights").read_text()) == ("3", "2")
    engine, critic = Engine(0), Engine(0)
    checkpoint.load_engine(tmp_path / "checkpoint", engine)
    checkpoint.load_engine(inside, critic)
    assert (engine.loaded, critic.loaded) == (3, 2)
    save(tmp_path / "checkpoint", 4)
    assert not inside.exists(), "the one before leaves nothing"


def test_a_checkpoint_whose_critic_cannot_be_written_is_none(tmp_path):
    critic = Engine(2)
    critic.snapshot = lambda: lambda folder: (_ for _ in ()).throw(OSError(28, "No space left on device"))
    with pytest.raises(OSError, match="No space"):
        checkpoint.snapshot(Engine(3), Names(), {"step": 3}, critic)(tmp_path / "checkpoint")
    assert checkpoints(tmp_path) == []


@pytest.mark.parametrize("crash", [1, 2, 3])
def test_a_crash_between_any_two_renames_leaves_a_whole_one(tmp_path, monkeypatch, crash):
    save(tmp_path / "checkpoint", 1)
    renames, rename = [], Path.rename

    def crashing(path, target):
        renames.append(path)
        if len(renames) == crash:
            raise KeyboardInterrupt
        return rename(path, target)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "rename", crashing)
        if crash <= 2:
            with pytest.raises(KeyboardInterrupt):
                save(tmp_path / "checkpoint", 2)
        else:
            save(tmp_path / "checkpoint", 2)
    found = newest_checkpoint(tmp_path)
    assert checkpoint.progress(found)["version"] == (1 if crash <= 2 else 2)
    save(tmp_path / "checkpoint", 3)
    assert checkpoint.progress(newest_checkpoint(tmp_path))["version"] == 3
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"], "nothing of what was given up is left"


def test_what_was_cut_off_is_no_checkpoint_and_is_swept_away_by_the_next(tmp_path):
    left = tmp_path / f".checkpoint.{os.getpid() + 1}.partial"
    left.mkdir()
    (left / "weights").write_text("half")
    assert checkpoints(tmp_path) == []
    save(tmp_path / "checkpoint", 1)
    assert not left.exists()


def test_a_write_that_fails_leaves_the_one_before(tmp_path):
    save(tmp_path / "checkpoint", 1)
    engine = Engine(2)
    engine.snapshot = lambda: lambda folder: (_ for _ in ()).throw(OSError(28, "No space left on device"))
    with pytest.raises(OSError, match="No space"):
        checkpoint.snapshot(engine, Names(), {"step": 2})(tmp_path / "checkpoint")
    assert checkpoint.progress(newest_checkpoint(tmp_path))["version"] == 1


def test_of_several_only_the_newest_are_kept(tmp_path):
    for step in (8, 9, 10, 11):
        save(tmp_path / f"step-{step:06d}", step)
    checkpoint.prune(tmp_path, 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000010", "step-000011"]


def test_an_engine_state_that_is_damaged_is_told_with_its_file(tmp_path):
    save(tmp_path / "checkpoint", 1)
    state = tmp_path / "checkpoint" / "engine.pt"
    state.write_bytes(state.read_bytes()[:100])
    with pytest.raises(CheckpointError, match=r"engine\.pt is damaged: .*go on from another checkpoint"):
        checkpoint.load_engine(tmp_path / "checkpoint", Engine(0))
