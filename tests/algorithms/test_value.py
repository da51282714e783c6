import math

import pytest
import torch

from asyncflow.algorithms.value import value_loss

values = torch.tensor([[1.0, 0.5, 2.0, math.nan]], dtype=torch.float64)
old = torch.tensor([[0.5, 0.5, 2.1, -9999.0]], dtype=torch.float64)
returns = torch.tensor([[1.5, 0.0, 0.0, math.inf]], dtype=torch.float64)
mask = torch.tensor([[1, 1, 1, 0]])


def test_the_larger_of_both_errors_counts():
    # The first value moved 0.5 towards its target, of which 0.2 count: 1.5 - 0.7 = 0.8.
    terms = value_loss(values, old, returns, mask, 0.2)
    assert terms.token_loss[0].tolist() == pytest.approx([0.32, 0.125, 2.0, 0.0])
    assert terms.clipped.tolist() == [[True, False, False, False]]


def test_a_clipped_value_has_no_gradient():
    leaf = values.clone().requires_grad_()
    value_loss(leaf, old, returns, mask, 0.2).token_loss.sum().backward()
    assert leaf.grad[0].tolist() == pytest.approx([0.0, 0.5, 2.0, 0.0])


def test_without_a_clip_the_old_value_does_not_count():
    terms = value_loss(values, torch.full_like(old, math.nan), returns, mask, None)
    assert terms.token_loss[0].tolist() == pytest.approx([0.125, 0.125, 2.0, 0.0])
    assert not terms.clipped.any()
