"""What is known of all rows before the gradient of a step begins, on one rank and beside another."""

from types import SimpleNamespace

import numpy as np
import pytest

from asyncflow.algorithms.aggregate import Denominators
from asyncflow.algorithms.loss import policy_loss
from asyncflow.algorithms.options import resolve
from asyncflow.stages.whole import Counted, Measured, whitened, with_denominators
from asyncflow.storage import Batch
from asyncflow.storage.batch import Column

BOUNDS = np.array([0, 2, 2, 5])
MASK = Column.ragged(np.array([1, 1, 1, 0, 1], np.uint8), BOUNDS, "list<uint8>")


def rows(advantages):
    column = Column.ragged(np.array(advantages, np.float32), BOUNDS, "list<float32>")
    return Batch({"advantage": column, "response_mask": MASK, "truncated": np.array([1.0, 0.0, 0.0], np.float32)})


def beside(*others):
    """A trainer of several ranks, of which the others say the same each time."""
    return SimpleNamespace(exchange=lambda word: [word, *others])


def test_advantages_are_whitened_over_the_trained_tokens_of_all_ranks():
    alone = whitened(rows([1, 2, 3, 99, 6]), beside())["advantage"]
    own = np.array([1, 2, 3, 6], float)
    assert alone.values[[0, 1, 2, 4]] == pytest.approx((own - 3) / (own.std(ddof=1) + 1e-6), rel=1e-5)
    assert alone.values[3] == 0
    assert alone.lengths.tolist() == [2, 0, 3]
    every = np.array([1, 2, 3, 6, 4, 8], float)
    together = whitened(rows([1, 2, 3, 99, 6]), beside(Measured(2, 12.0, 8.0)))["advantage"]
    assert together.values[[0, 1, 2, 4]] == pytest.approx(((every - 4) / (every.std(ddof=1) + 1e-6))[:4], rel=1e-5)


def test_each_part_of_the_loss_is_divided_by_the_rows_that_it_has():
    filters = {"policy": ["finished"], "entropy": ["positive"]}
    options = resolve("grpo", {"filters": filters, "entropy_coef": 0.1})
    loss = policy_loss(options, Denominators(1, 1), max_response_tokens=8)
    other = Counted((10, 3), {"policy": (7, 2), "entropy": (0, 0)})
    found = with_denominators(rows([1, -1, 1, 1, 1]), loss, beside(other))
    assert found.denominators == Denominators(14, 5)
    assert found.filtered == {"policy": Denominators(9, 3), "entropy": Denominators(3, 2)}
