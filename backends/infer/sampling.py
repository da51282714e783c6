"""Drawing tokens: pure functions on logits, vectorised over rows.

A token is drawn by inverting the cumulative distribution, in float64 and in the order of token ids, at a number
that depends on the row's seed and the token's place alone. So a response does not depend on what else is in the
batch, up to rounding of the logits.
"""

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from asyncflow.types import Float64s

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_BITS = 48  # few enough that u x total never rounds up to the total


class Knobs(NamedTuple):
    """How each row draws; all of shape (B,)."""

    temperature: npt.NDArray[np.float32]
    """0 is greedy."""
    top_p: npt.NDArray[np.float64]
    """1 keeps all."""
    top_k: npt.NDArray[np.int64]
    """-1 or 0 keeps all."""


def uniforms(seeds: npt.NDArray[np.uint64], places: npt.NDArray[np.int64]) -> Float64s:
    """Return numbers in [0, 1) that are a hash of seed and place (splitmix64, Steele et al. 2014)."""
    hashed = _mix(_mix(seeds) + (places.astype(np.uint64) + np.uint64(1)) * _GOLDEN)
    return (hashed >> np.uint64(64 - _BITS)).astype(np.float64) * 2.0**-_BITS


def _mix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def draw(logits: Tensor, knobs: Knobs, uniform: Float64s) -> tuple[Tensor, Tensor]:
    """Return the drawn tokens int64 (B,) and their log-probabilities float32 (B,), from logits (B, V).

    Log-probabilities are those of the whole distribution at the row's temperature, before top-k and top-p; of
    greedy rows at temperature 1.
    """
    greedy = knobs.temperature == 0
    scale = _on(np.where(greedy, 1, knobs.temperature).astype(np.float32), logits)
    logs = torch.log_softmax(logits.float() / scale[:, None], dim=-1)
    if greedy.all():
        tokens = logs.argmax(dim=-1)
    else:
        tokens = _invert(_kept(logs.double().exp(), knobs), _on(uniform, logits))
        if greedy.any():
            tokens = torch.where(_on(greedy, logits), logs.argmax(dim=-1), tokens)
    return tokens, logs.gather(-1, tokens[:, None])[:, 0]


def _kept(probabilities: Tensor, knobs: Knobs) -> Tensor:
    """Return probabilities (B, V) with 0 for what top-k, then top-p over the rest, leave out; not renormalised."""
    top_k = np.where(knobs.top_k > 0, knobs.top_k, probabilities.shape[1])
    if (top_k >= probabilities.shape[1]).all() and (knobs.top_p >= 1).all():
        return probabilities
    ranked, order = probabilities.sort(dim=-1, descending=True, stable=True)
    ranks = torch.arange(ranked.shape[1], device=ranked.device)
    ranked = ranked * (ranks < _on(top_k, ranked)[:, None])
    before = torch.nn.functional.pad(ranked.cumsum(-1)[:, :-1], (1, 0))
    top_p = _on(np.where(knobs.top_p >= 1, np.inf, knobs.top_p), ranked)[:, None]
    ranked = ranked * ((before < top_p * ranked.sum(-1, keepdim=True)) | (ranks == 0))
    return torch.zeros_like(ranked).scatter_(-1, order, ranked)


def _invert(probabilities: Tensor, uniform: Tensor) -> Tensor:
    """Return the first token at which the cumulative sum exceeds u x total: never one of probability 0."""
    cumulative = probabilities.cumsum(-1)
    target = uniform[:, None] * cumulative[:, -1:]
    found = torch.searchsorted(cumulative, target, right=True)[:, 0]
    return found.clamp(max=probabilities.shape[1] - 1)


def _on(values: npt.NDArray[Any], like: Tensor) -> Tensor:
    return torch.from_numpy(values).to(like.device)
