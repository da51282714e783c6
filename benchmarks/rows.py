"""The rows that all subjects of the queue benchmark carry; needs numpy only, since the peer's environment reads it.

A column is flat values, and offsets where its cells differ in length.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Values = npt.NDArray[np.generic]
Rows = dict[str, tuple[Values, "npt.NDArray[np.int64] | None"]]

LENGTHS = (100, 2000)


@dataclass(frozen=True)
class Case:
    """So many rows of one kind: `tokens`, as a training step has them, or `blobs` of 1 MiB."""

    name: str
    kind: str
    count: int

    def rows(self, seed: int = 0) -> Rows:
        """Return the columns, the same for the same seed."""
        draw = np.random.default_rng(seed)
        if self.kind == "blobs":
            blob = draw.integers(0, 256, (self.count, 1 << 20), dtype=np.uint8)
            return {"blob": (blob.reshape(-1), np.arange(self.count + 1) << 20)}
        prompt, response = (_bounds(draw.integers(*LENGTHS, self.count, endpoint=True)) for _ in range(2))
        return {
            "prompt_ids": (draw.integers(0, 150_000, prompt[-1]), prompt),
            "response_ids": (draw.integers(0, 150_000, response[-1]), response),
            "logprobs": (-draw.random(response[-1], dtype=np.float32), response),
            "reward": (draw.random(self.count, dtype=np.float32), None),
        }


def _bounds(lengths: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    return np.concatenate([[0], np.cumsum(lengths)])


def nbytes(rows: Rows) -> int:
    """Bytes of values and offsets."""
    return sum(values.nbytes + (0 if bounds is None else bounds.nbytes) for values, bounds in rows.values())
