"""Reference: what the model that reinforcement learning began with says of each response token.

That is the model of the configuration or, after a warm-up, the one that the flow keeps in the run's folder.
"""

from asyncflow.backends.base import ModelSpec
from asyncflow.data.tokenizer import tokenizer
from asyncflow.stage import Context
from asyncflow.stages.frozen import Frozen
from asyncflow.stages.model import model_spec

FOLDER = "reference"
"""Folder of a run that keeps the model after a warm-up, for a resumed run too."""


def reference() -> Frozen:
    """Make the stage that writes `ref_logprobs`."""
    return Frozen("ref_logprobs", _model)


def _model(context: Context) -> ModelSpec | None:
    config, kept = context.config, context.folder / FOLDER
    if not kept.exists() and config.warmup is not None:
        return None
    return model_spec(config, tokenizer(config.model), kept if kept.exists() else None)
