"""The order in which prompts are drawn: endless, in epochs, and the same for the same seed.

Epoch e is a permutation that follows from (seed, e) alone, so the state is one number: how many were drawn.
"""

from collections.abc import Mapping

import numpy as np

from asyncflow.errors import CheckpointError, DataError
from asyncflow.types import Int64s

_STREAM = 0x0DA7A  # keeps these draws apart from others that are made from the same seed


class Order:
    """Draws indices below `size`: every epoch has each exactly once, and a draw may reach over its end."""

    def __init__(self, size: int, seed: int, shuffle: bool = True) -> None:
        if size < 1:
            raise DataError("no prompts to draw from")
        self.size, self.seed, self.shuffle = size, seed, shuffle
        self._drawn = 0
        self._cached: tuple[int, Int64s] | None = None

    @property
    def epoch(self) -> int:
        """Number of epochs that are complete."""
        return self._drawn // self.size

    def take(self, count: int) -> Int64s:
        """Draw the next `count` indices, int64."""
        parts, wanted = [np.empty(0, dtype=np.int64)], count
        while wanted > 0:
            epoch, start = divmod(self._drawn, self.size)
            part = self._permutation(epoch)[start : start + wanted]
            parts.append(part)
            wanted -= len(part)
            self._drawn += len(part)
        return np.concatenate(parts)

    def state(self) -> dict[str, int]:
        """What `restore` needs to go on exactly here."""
        return {"size": self.size, "seed": self.seed, "shuffle": int(self.shuffle), "drawn": self._drawn}

    def restore(self, state: Mapping[str, int]) -> None:
        """Go on where `state` was taken; CheckpointError if it is the state of another order."""
        here = self.state()
        changed = [name for name in ("size", "seed", "shuffle") if state.get(name) != here[name]]
        if changed or "drawn" not in state:
            what = ", ".join(f"{name} {state.get(name)} instead of {here[name]}" for name in changed)
            raise CheckpointError(f"prompts cannot be drawn on from this checkpoint: {what or 'it has no position'}")
        self._drawn = state["drawn"]

    def _permutation(self, epoch: int) -> Int64s:
        if self._cached is None or self._cached[0] != epoch:
            plain = np.arange(self.size, dtype=np.int64)
            drawn = np.random.default_rng((_STREAM, self.seed, epoch)).permutation(plain) if self.shuffle else plain
            self._cached = epoch, drawn
        return self._cached[1]
