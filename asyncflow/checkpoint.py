"""Checkpoints: the model in Hugging Face format, and beside it what a run needs to go on; a critic in a folder inside.

The state is copied at once, and written later in whichever thread. A checkpoint is a folder that appears complete or
not at all: it is written under another name, synced and renamed. `progress.json` is written last and names the
format, so that a foreign or cut-off folder is refused.
"""

import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from asyncflow.backends.base import TrainEngine
from asyncflow.errors import CheckpointError

FORMAT = 1
FINISHED = "finished.arrow"
"""Responses that are finished and not trained (`asyncflow.finished`)."""
CRITIC = "critic"
"""Folder of a checkpoint with the critic, where there is one."""
_STATE = "engine.pt"


def snapshot(
    engine: TrainEngine,
    tokenizer: Any,
    progress: Mapping[str, object],
    critic: TrainEngine | None = None,
    finished: str = "",
) -> Callable[[Path], None]:
    """Copy what a checkpoint is made of; what is returned writes it into a folder, replacing one of the same name.

    The copy takes as much host memory as the models and their optimizers, until it is written. `finished` is a file
    of responses, if there is one, which moves into the folder.
    """
    writes = {"": _copied(engine)}
    if critic is not None:
        writes[CRITIC] = _copied(critic)
    record = {"format": FORMAT, "version": engine.version, **progress}
    return lambda folder: _write(folder, writes, tokenizer, record, finished)


def _copied(engine: TrainEngine) -> Callable[[Path], None]:
    model, state = engine.snapshot(), engine.state()

    def write(folder: Path) -> None:
        import torch

        model(folder)
        torch.save(state, folder / _STATE)

    return write


def _write(
    folder: Path,
    writes: Mapping[str, Callable[[Path], None]],
    tokenizer: Any,
    record: Mapping[str, object],
    finished: str,
) -> None:
    partial = folder.with_name(f".{folder.name}.{os.getpid()}.partial")
    for abandoned in folder.parent.glob(f".{folder.name}.*.partial"):
        shutil.rmtree(abandoned, ignore_errors=True)
    for name, write in writes.items():
        (partial / name).mkdir(parents=True)
        write(partial / name)
    tokenizer.save_pretrained(partial)
    if finished:
        Path(finished).rename(partial / FINISHED)
    (partial / "progress.json").write_text(json.dumps(record, indent=1))
    for path in partial.rglob("*"):
        _sync(path)
    _replace(partial, folder)


def progress(folder: Path) -> dict[str, Any]:
    """Return what `save` was told, with the version; CheckpointError if the folder is not a whole checkpoint."""
    path = folder / "progress.json"
    try:
        record = json.loads(path.read_text())
    except FileNotFoundError:
        raise CheckpointError(f"{folder} is not a checkpoint: it has no progress.json") from None
    except ValueError as error:
        raise CheckpointError(f"{path} is damaged: {error}") from None
    if not isinstance(record, dict) or record.get("format") != FORMAT:
        raise CheckpointError(f"{path} is not of format {FORMAT}, which this version reads")
    for name in ("version", "step"):
        if not isinstance(record.get(name), int):
            raise CheckpointError(f"{path} is damaged: it names no {name}")
    return record


def load_engine(folder: Path, engine: TrainEngine) -> None:
    """Bring the optimizer, the version and the random state of an engine back; it holds the weights already."""
    import torch

    try:
        state = torch.load(folder / _STATE, weights_only=True)
    except FileNotFoundError:
        raise CheckpointError(f"{folder} has no {_STATE}") from None
    except Exception as error:  # torch names no one kind for a file that it cannot read
        raise CheckpointError(f"{folder / _STATE} is damaged: {error}; go on from another checkpoint") from error
    engine.load_state(state)


def prune(folder: Path, keep: int) -> None:
    """Delete all but the newest checkpoints of a folder."""
    for old in sorted(folder.glob("step-*"))[:-keep]:
        shutil.rmtree(old, ignore_errors=True)


def _replace(partial: Path, folder: Path) -> None:
    aside = folder.with_name(f".{folder.name}.old")  # found by a resume that follows a crash right here
    shutil.rmtree(aside, ignore_errors=True)
    if folder.exists():
        folder.rename(aside)
    partial.rename(folder)
    _sync(folder.parent)
    shutil.rmtree(aside, ignore_errors=True)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
