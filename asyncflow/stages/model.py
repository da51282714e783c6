"""What the engines of a run must agree on: which model, which tokens pad and which end a response."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from asyncflow.backends.base import ModelSpec
from asyncflow.config.model import Pipeline
from asyncflow.errors import ConfigError


def model_spec(config: Pipeline, tokenizer: Any, checkpoint: Path | None = None) -> ModelSpec:
    """Describe the model to an engine: that of the configuration, or as a checkpoint left it."""
    shape = config.model.config
    if shape is not None and "vocab_size" not in shape:
        shape = {**shape, "vocab_size": len(tokenizer)}
    return ModelSpec(
        path=config.model.path if checkpoint is None else str(checkpoint),
        config=shape,
        dtype=config.model.dtype,
        seed=config.seed,
        pad_token=tokenizer.pad_token_id,
        eos_token=tokenizer.eos_token_id,
    )


def train_options(config: Pipeline) -> Mapping[str, object]:
    """Return the options of the training engine, `train.packing` among them where it is on."""
    train = config.train
    return {**train.options, "packing": True} if train.packing else train.options


def stop_tokens(tokenizer: Any, strings: list[str]) -> frozenset[int]:
    """Ids of the tokens that end a response; a string that is not exactly one token is refused (ConfigError)."""
    ids = {tokenizer.eos_token_id} - {None}
    for string in strings:
        encoded = tokenizer.encode(string, add_special_tokens=False)
        if len(encoded) != 1:
            raise ConfigError(f"rollout.stop: {string!r} is {len(encoded)} tokens of this tokenizer, and must be one")
        ids.add(encoded[0])
    if not ids:
        raise ConfigError("the tokenizer has no end-of-sequence token: name one in rollout.stop")
    return frozenset(ids)
