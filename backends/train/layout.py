"""How the rows of a micro-batch stand in the model's input: padded to one width here, or packed (see `packed`).

A layout says which logits precede which response tokens, and brings what was found for these tokens back to
(B, R). B rows, L tokens, R response positions, V tokens of the vocabulary.
"""

from dataclasses import dataclass
from typing import Any, Protocol, cast

from torch import Tensor

from asyncflow.backends.base import MicroBatch


class Layout(Protocol):
    """One way to run a model over a micro-batch; `...` is the same in all three, and empty where R is 0."""

    def tokens(self, micro_batch: MicroBatch) -> Tensor:
        """Return the response tokens, int64 (...)."""

    def logits(self, micro_batch: MicroBatch) -> Tensor:
        """Run the model and return what it says before each of these tokens, (..., V)."""

    def placed(self, values: Tensor, micro_batch: MicroBatch) -> Tensor:
        """Bring values (...) to (B, R)."""


@dataclass(frozen=True, slots=True)
class Padded:
    """Every row as wide as the widest; values at padding are computed too, and mean nothing."""

    model: Any

    def tokens(self, micro_batch: MicroBatch) -> Tensor:
        """Return the response tokens, (B, R)."""
        return micro_batch.tokens[:, micro_batch.tokens.shape[1] - micro_batch.mask.shape[1] :]

    def logits(self, micro_batch: MicroBatch) -> Tensor:
        """Run the model over (B, L - 1) tokens."""
        attention = micro_batch.attention[:, :-1]
        output = self.model(
            input_ids=micro_batch.tokens[:, :-1],
            attention_mask=attention,
            position_ids=(attention.cumsum(-1) - 1).clamp(min=0),
            use_cache=False,
            logits_to_keep=micro_batch.mask.shape[1],
        )
        return cast("Tensor", output.logits)

    def placed(self, values: Tensor, micro_batch: MicroBatch) -> Tensor:
        """Return the values: they are in place."""
        return values
