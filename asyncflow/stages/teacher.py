"""Teacher: what the model that is distilled into the policy says of each response token."""

from pathlib import Path

from asyncflow.backends.base import ModelSpec
from asyncflow.data.tokenizer import tokenizer
from asyncflow.stage import Context
from asyncflow.stages.frozen import Frozen
from asyncflow.stages.model import model_spec


def teacher() -> Frozen:
    """Make the stage that writes `teacher_logprobs`."""
    return Frozen("teacher_logprobs", _model)


def _model(context: Context) -> ModelSpec:
    config = context.config
    assert config.teacher is not None
    return model_spec(config, tokenizer(config.model), Path(config.teacher.path))
