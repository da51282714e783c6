"""Rows of a micro-batch one after another in one sequence, without padding.

Positions begin anew with each row, and no row sees another. With `attention: sdpa` each row attends by itself: that
costs the sum of the squares of the lengths, where one mask over the whole sequence would cost the square of their
sum. With `eager` transformers makes that mask from the positions.

Whether a model can be packed is tried out, on a few tokens, when the layout is made: one whose positions or whose
memory run on from row to row is refused.
"""

from typing import Any, cast

import torch
from torch import Tensor

from asyncflow.backends.base import MicroBatch
from asyncflow.backends.train.layout import Padded
from asyncflow.errors import ConfigError

ROWS = "asyncflow_rows"
"""Name of the attention of single rows in transformers' registry."""
_TOLERANCE = 1e-4
"""Of the largest logit: rounding is below 1e-6 of it; what leaked from row to row was never below 1e-3."""


class Packed:
    """A `Layout` of N response tokens in (1, T): T is all tokens but the last of each row, which nothing follows.

    Rows without a response are left out. ConfigError for a model or an attention that does not allow it.
    """

    def __init__(self, model: Any, attention: str) -> None:
        if attention not in ("sdpa", "eager"):
            raise ConfigError(f"options.packing: works with attention sdpa and eager, not with {attention}")
        self._model, self._alone = model, attention == "sdpa"
        trial = _trial(model)
        with torch.no_grad():
            expected = Padded(model).logits(trial)[_real(trial)]
            if self._alone:
                _register()
                model.set_attn_implementation(ROWS)
            self._compare(expected, trial)

    def tokens(self, micro_batch: MicroBatch) -> Tensor:
        """Return the response tokens, row after row, (N,)."""
        return Padded(self._model).tokens(micro_batch)[_real(micro_batch)]

    def logits(self, micro_batch: MicroBatch) -> Tensor:
        """Run the model over (1, T) tokens, and its head over N of them."""
        attention, responses = micro_batch.attention, micro_batch.mask.shape[1]
        kept = (attention[:, :-1] * attention[:, 1:] * _real(micro_batch).any(dim=1, keepdim=True)) != 0
        before = torch.zeros_like(kept)
        before[:, kept.shape[1] - responses :] = True
        positions = (attention.cumsum(-1) - 1)[:, :-1]
        output = self._model(
            input_ids=micro_batch.tokens[:, :-1][kept][None],
            position_ids=positions[kept][None],
            use_cache=False,
            logits_to_keep=before[kept].nonzero()[:, 0],
            **(self._boundaries(kept) if self._alone else {}),
        )
        return cast("Tensor", output.logits)[0]

    def placed(self, values: Tensor, micro_batch: MicroBatch) -> Tensor:
        """Bring values (N,) to (B, R), with zeros at padding."""
        real = _real(micro_batch)
        return values.new_zeros(real.shape).masked_scatter(real, values)

    def _boundaries(self, kept: Tensor) -> dict[str, object]:
        lengths = [length for length in kept.sum(dim=1).tolist() if length]
        # As long as the longest row, so that the model's mask (see `_mask`) is that of one row by itself.
        return {"row_lengths": lengths, "attention_mask": kept.new_ones(1, max(lengths))}

    def _compare(self, expected: Tensor, trial: MicroBatch) -> None:
        kind = self._model.config.model_type
        try:
            found = self.logits(trial)
        except (RuntimeError, TypeError, ValueError) as error:
            raise ConfigError(f"options.packing: {kind} does not take packed rows ({error})") from error
        gap = float((found - expected).abs().max() / expected.abs().max())
        if not gap < _TOLERANCE:
            raise ConfigError(f"options.packing: rows of {kind} would see each other when packed: train without it")


def _real(micro_batch: MicroBatch) -> Tensor:
    """Where there are response tokens, bool (B, R)."""
    attention = micro_batch.attention
    return attention[:, attention.shape[1] - micro_batch.mask.shape[1] :] != 0


def _trial(model: Any) -> MicroBatch:
    """Make three rows of different tokens, prompts of 1, 4 and 2 and responses of 3, 1 and 2."""
    column = torch.arange(7, device=model.device)
    first, end = (torch.tensor(places, device=model.device)[:, None] for places in ([3, 0, 2], [7, 5, 6]))
    attention = ((column >= first) & (column < end)).long()
    tokens = torch.arange(21, device=model.device).view(3, 7) % model.get_input_embeddings().num_embeddings
    return MicroBatch(tokens, attention, attention[:, 4:].float(), {}, rows=first[:, 0].cpu().numpy())


def _register() -> None:
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(ROWS, _attend)
    AttentionMaskInterface.register(ROWS, _mask)


def _mask(*, q_length: int, kv_length: int, **given: Any) -> Tensor | None:
    """Return the model's mask of the longest row, with the window of a layer that has one; None if it is causal."""
    from transformers.masking_utils import sdpa_mask

    return sdpa_mask(q_length=kv_length, kv_length=kv_length, **given)


def _attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    row_lengths: list[int],
    **given: Any,
) -> tuple[Tensor, None]:
    """Let every row attend by itself; queries, keys and values are (1, heads, T, size)."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    found = []
    for q, k, v in zip(*(torch.split(states, row_lengths, dim=2) for states in (query, key, value)), strict=True):
        length = q.shape[2]
        mask = None if attention_mask is None else attention_mask[..., :length, :length]
        found.append(sdpa_attention_forward(module, q, k, v, mask, **given)[0])
    return torch.cat(found, dim=1), None
