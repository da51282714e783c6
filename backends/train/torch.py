"""The training engine on plain torch: a Hugging Face model and AdamW, whole in each data-parallel process.

Weights are kept and updated in float32 (float64 with that dtype); with dtype bfloat16 the forward pass runs under
autocast and exported weights are bfloat16. Ranks hold equal weights: they start from the same seed or folder, and
step on the sum of their gradients. The model is in evaluation mode throughout: dropout would make the
ratio differ from 1 at zero lag.
"""

import copy
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from asyncflow.algorithms.report import Report
from asyncflow.backends.base import ALONE, Loss, MicroBatch, ModelSpec, OptimSpec, Ranks, Scored, StepReport
from asyncflow.backends.models import default_device, new_model, read_options
from asyncflow.backends.train.cut import cut, padded
from asyncflow.backends.train.group import Group
from asyncflow.backends.train.layout import Layout, Padded
from asyncflow.backends.train.packed import Packed
from asyncflow.backends.train.value import value_model
from asyncflow.errors import CheckpointError, ConfigError
from asyncflow.storage.batch import Batch
from asyncflow.types import RowIds, Version

_OPTIONS: Mapping[str, object] = {
    "device": None,
    "attention": "sdpa",
    "gradient_checkpointing": False,
    "packing": False,
}


class TorchEngine:
    """A `TrainEngine`; options: `device`, `attention`, `gradient_checkpointing`, `packing`."""

    def __init__(
        self,
        model: ModelSpec,
        *,
        optim: OptimSpec,
        temperature: float,
        options: Mapping[str, object],
        ranks: Ranks = ALONE,
    ) -> None:
        if not temperature > 0:
            raise ConfigError(f"rollout.temperature: {temperature}; a policy is trained at a temperature above 0")
        chosen = read_options("torch", options, _OPTIONS)
        self._spec, self._optim, self._temperature = model, optim, temperature
        self._device = torch.device(chosen["device"] or default_device())
        self._number = torch.float64 if model.dtype == "float64" else torch.float32
        self._model: Any = (value_model if model.head == "value" else new_model)(model, self._number)
        self._layout = self._prepare(**chosen)
        self._parameters = [p for p in self._model.parameters() if p.requires_grad]
        self._adamw = _adamw(self._parameters, optim)
        self._version = 0
        self._group = Group(ranks, self._device)

    def _prepare(self, *, attention: str, gradient_checkpointing: bool, packing: bool, **_: object) -> Layout:
        self._model.to(self._device)
        self._model.set_attn_implementation(attention)
        if gradient_checkpointing:
            _recompute(self._model)
        return Packed(self._model, attention) if packing else Padded(self._model)

    @property
    def version(self) -> Version:
        """Number of optimizer steps behind the weights."""
        return self._version

    @property
    def data_parallel(self) -> tuple[int, int]:
        """(rank, size) of this process."""
        return self._group.rank, self._group.size

    def exchange(self, data: bytes) -> list[bytes]:
        """Return what every rank gave, in the order of the ranks."""
        return self._group.exchange(data)

    def micro_batches(
        self,
        batch: Batch,
        token_budget: int,
        columns: Sequence[str],
        rows: RowIds | None = None,
        *,
        alone: bool = False,
    ) -> Iterator[MicroBatch]:
        """Cut rows into micro-batches (see `cut`) on the engine's device, as many on every rank unless `alone`."""
        pad, packed = self._spec.pad_token, isinstance(self._layout, Packed)
        size, parts = cut(batch, token_budget, columns, rows, pad=pad, device=self._device, packed=packed)
        lacking = 0 if alone else self._group.largest(size) - size
        empty = (self._nothing(batch, columns) for _ in range(lacking))
        return itertools.chain(parts, empty)

    def _nothing(self, batch: Batch, columns: Sequence[str]) -> MicroBatch:
        return padded(batch.take([]), np.empty(0, np.int64), columns, self._spec.pad_token, self._device)

    def forward_backward(self, micro_batch: MicroBatch, loss: Loss, *, entropy: bool = False) -> Report:
        """Add the gradient of `loss` and return what it reports."""
        with self._autocast():
            scored = self._score(micro_batch, entropy)
        value, report = loss(scored, micro_batch)
        torch.autograd.backward(value)
        return report

    def optim_step(self, lr: float, scale: float = 1.0) -> StepReport:
        """Add the ranks' gradients up, scale and clip them, step, and clear them.

        After a gradient that is not finite (FloatingPointError) weights, optimizer and version are as before,
        and the gradients are cleared.
        """
        self._group.add_gradients(self._parameters)
        gradients = [p.grad for p in self._parameters if p.grad is not None]
        if scale != 1.0 and gradients:
            torch._foreach_mul_(gradients, scale)
        norm = torch.nn.utils.get_total_norm(gradients)
        if not torch.isfinite(norm):
            names = [n for n, p in self._model.named_parameters() if p.grad is not None and not p.grad.isfinite().all()]
            self._clear()
            raise FloatingPointError(f"the gradient after version {self._version} is not finite, first in {names[:3]}")
        torch.nn.utils.clip_grads_with_norm_(self._parameters, self._optim.max_grad_norm, norm)
        for group in self._adamw.param_groups:
            group["lr"] = lr
        self._adamw.step()
        self._clear()
        self._version += 1
        return StepReport(self._version, float(norm), lr)

    def logprobs(self, micro_batch: MicroBatch) -> Tensor:
        """Log-probabilities of the response tokens at the sampling temperature, (B, R), without gradient."""
        with torch.no_grad(), self._autocast():
            logs, tokens = self._log_softmax(micro_batch)
            return self._layout.placed(_chosen(logs, tokens), micro_batch)

    def values(self, micro_batch: MicroBatch) -> Tensor:
        """What the value head says before each response token, (B, R), without gradient."""
        with torch.no_grad(), self._autocast():
            return self._values(micro_batch)

    def export_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield every tensor of the state dict, tied ones included, as a copy on the CPU in the model's dtype.

        Rank 0 yields them, others nothing: all hold the same.
        """
        if self._group.rank:
            return
        dtype = getattr(torch, self._spec.dtype)
        for name, tensor in self._model.state_dict().items():
            kind = dtype if tensor.is_floating_point() else tensor.dtype
            yield name, tensor.detach().to("cpu", kind, copy=True)

    def snapshot(self) -> Callable[[Path], None]:
        """Copy the weights in float32, as they are trained; what is returned writes model and config."""
        copies: dict[tuple[object, ...], Tensor] = {}
        state = {}
        for name, tensor in self._model.state_dict().items():
            # Tied tensors stay tied: each is copied, and written, once.
            place = (tensor.data_ptr(), tensor.shape, tensor.stride()) if tensor.numel() else (name,)
            if place not in copies:
                copies[place] = tensor.detach().to("cpu", copy=True)
            state[name] = copies[place]
        return lambda folder: self._model.save_pretrained(folder, state_dict=state)

    def state(self) -> dict[str, object]:
        """Optimizer, version and torch's random state, as copies."""
        optimizer = copy.deepcopy(self._adamw.state_dict())
        return {"version": self._version, "optimizer": optimizer, "rng": torch.get_rng_state()}

    def load_state(self, state: dict[str, object]) -> None:
        """Go on exactly where `state` was taken, given the same weights."""
        missing = {"version", "optimizer", "rng"} - state.keys()
        if missing:
            raise CheckpointError(f"the state of the torch engine lacks {', '.join(sorted(missing))}")
        try:
            self._adamw.load_state_dict(copy.deepcopy(cast("dict[str, Any]", state["optimizer"])))
        except (ValueError, KeyError) as error:
            raise CheckpointError(f"the optimizer's state does not fit this model: {error}") from error
        torch.set_rng_state(cast("Tensor", state["rng"]))
        self._version = cast("int", state["version"])
        self._clear()

    def sleep(self) -> None:
        """Free the gradients and move model and optimizer off an accelerator; refused inside a step."""
        if any(p.grad is not None for p in self._parameters):
            raise RuntimeError("sleep between forward_backward and optim_step would lose gradients")
        self._move(torch.device("cpu"))

    def wake(self) -> None:
        """Undo `sleep`."""
        self._move(self._device)

    def close(self) -> None:
        """Leave the ranks, and free model, gradients and optimizer."""
        self._group.close()
        self._clear()
        self._adamw.state.clear()
        self._parameters = []
        self._model.to("meta")

    def _clear(self) -> None:
        self._adamw.zero_grad(set_to_none=True)

    def _move(self, device: torch.device) -> None:
        self._model.to(device)
        for state in self._adamw.state.values():
            for name, value in state.items():
                if isinstance(value, Tensor):
                    state[name] = value.to(device)

    def _autocast(self) -> AbstractContextManager[object]:
        return torch.autocast(self._device.type, torch.bfloat16, enabled=self._spec.dtype == "bfloat16")

    def _score(self, micro_batch: MicroBatch, entropy: bool) -> Scored:
        if self._spec.head == "value":
            values = self._values(micro_batch)
            return Scored(torch.zeros_like(values), None, values)
        logs, tokens = self._log_softmax(micro_batch)
        whole = logs if entropy else logs.detach()
        found = _chosen(logs, tokens), -(whole.exp() * whole).sum(-1)
        return Scored(*(self._layout.placed(values, micro_batch) for values in found))

    def _log_softmax(self, micro_batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """Return the log-probabilities of the whole vocabulary before each response token, and these tokens."""
        tokens = self._layout.tokens(micro_batch)
        if not tokens.numel():
            return torch.zeros(*tokens.shape, 1, dtype=self._number, device=self._device, requires_grad=True), tokens
        logits = self._layout.logits(micro_batch).to(self._number)
        return torch.log_softmax(logits / self._temperature, dim=-1), tokens

    def _values(self, micro_batch: MicroBatch) -> Tensor:
        tokens = self._layout.tokens(micro_batch)
        if not tokens.numel():
            found = torch.zeros(tokens.shape, dtype=self._number, device=self._device, requires_grad=True)
        else:
            found = self._model.values(self._layout.logits(micro_batch))
        return self._layout.placed(found, micro_batch)


def _recompute(model: Any) -> None:
    """Let each layer keep only its input for the backward pass.

    By hand: transformers does it in training mode alone, in which there would be dropout.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        raise ConfigError(f"options.gradient_checkpointing: {model.config.model_type} has no layers to recompute")
    for layer in layers:
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False)


def _chosen(logs: Tensor, tokens: Tensor) -> Tensor:
    return logs.gather(-1, tokens[..., None])[..., 0]


def _adamw(parameters: Sequence[torch.nn.Parameter], optim: OptimSpec) -> torch.optim.AdamW:
    matrices = [p for p in parameters if p.ndim >= 2]
    others = [p for p in parameters if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": optim.weight_decay}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW([g for g in groups if g["params"]], lr=0.0, betas=optim.betas, eps=optim.eps, fused=True)
