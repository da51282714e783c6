"""A Hugging Face model with a value head: one number for each position, in place of the next token.

In a folder the model stands in Hugging Face format, and the head beside it in a file of its own. So it can begin as
any language model, whose own head is left out, with values of 0: the new head starts at zero.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from asyncflow.backends.base import ModelSpec
from asyncflow.backends.models import new_body
from asyncflow.errors import ConfigError

HEAD = "value_head.safetensors"
"""File of the head in the model's folder."""


@dataclass(frozen=True, slots=True)
class States:
    """What the body says, where a language model has logits: hidden states (B, T, H)."""

    logits: Tensor


class ValueModel(torch.nn.Module):
    """Runs as a language model does, so that every layout knows it, but gives hidden states for `values`."""

    def __init__(self, body: Any) -> None:
        super().__init__()
        self.body = body
        self.head = torch.nn.Linear(body.config.get_text_config().hidden_size, 1, dtype=body.dtype)
        with torch.no_grad():
            for parameter in self.head.parameters():
                parameter.zero_()

    @property
    def config(self) -> Any:
        """The body's."""
        return self.body.config

    @property
    def device(self) -> torch.device:
        """The body's."""
        device: torch.device = self.body.device
        return device

    def get_input_embeddings(self) -> torch.nn.Embedding:
        """Return the body's."""
        embeddings: torch.nn.Embedding = self.body.get_input_embeddings()
        return embeddings

    def set_attn_implementation(self, name: str) -> None:
        """Choose the body's attention."""
        self.body.set_attn_implementation(name)

    def forward(self, *, logits_to_keep: int | Tensor, **given: Any) -> States:
        """Return the last hidden states: of so many positions at the end, or of these."""
        found = self.body(**given).last_hidden_state
        last = slice(found.shape[1] - logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        return States(found[:, last])

    def values(self, states: Tensor) -> Tensor:
        """Return the value (...) of each hidden state (..., H), in the dtype of the weights, autocast or not."""
        with torch.autocast(states.device.type, enabled=False):
            found: Tensor = self.head(states.to(self.head.weight.dtype))[..., 0]
        return found

    def save_pretrained(self, folder: Path, state_dict: Mapping[str, Tensor]) -> None:
        """Write body and head."""
        self.body.save_pretrained(folder, state_dict=_part(state_dict, "body."))
        save_file(_part(state_dict, "head."), folder / HEAD)


def value_model(spec: ModelSpec, dtype: torch.dtype) -> ValueModel:
    """Return the model that `new_model` would make or read, with a value head: the folder's, or a new one."""
    model = ValueModel(new_body(spec, dtype))
    if spec.path is None or not (file := Path(spec.path) / HEAD).exists():
        return model
    try:
        model.head.load_state_dict(load_file(file))
    except (RuntimeError, SafetensorError) as error:
        raise ConfigError(f"{file} is not the value head of the model beside it: {error}") from error
    return model


def _part(state_dict: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): own for name, own in state_dict.items() if name.startswith(prefix)}
