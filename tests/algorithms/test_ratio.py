import math

import pytest
import torch

from asyncflow.algorithms.ratio import MAX_LOG_RATIO, held, log_ratio, over_row

values = torch.tensor([[1.0, -3.0, math.nan], [math.inf, math.nan, -math.inf]])
mask = torch.tensor([[1, 1, 0], [0, 0, 0]])


@pytest.mark.parametrize(
    ("how", "expected"), [("sum", [[-2.0], [0.0]]), ("mean", [[-1.0], [0.0]]), ("max", [[1.0], [-math.inf]])]
)
def test_rows_are_reduced_over_their_trained_tokens(how, expected):
    assert over_row(values, mask, how).tolist() == expected


def test_log_ratios_are_zero_under_the_mask_and_have_one_gradient():
    new, other = (torch.tensor([[-1.0, math.nan]]).requires_grad_() for _ in range(2))
    found = log_ratio(new, other, torch.tensor([[1, 0]]))
    found.sum().backward()
    assert found.tolist() == [[0.0, 0.0]]
    assert new.grad.tolist() == [[1.0, 0.0]]
    assert other.grad is None


def test_log_ratios_are_held_on_both_sides():
    assert held(torch.tensor([-500.0, 0.5, 500.0])).tolist() == [-MAX_LOG_RATIO, 0.5, MAX_LOG_RATIO]
