import math
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncflow.algorithms.ratio import MAX_LOG_RATIO
from asyncflow.algorithms.spread import BOUNDS, merge, quantiles, spread

AT = [0.0, 0.5, 0.9, 0.99, 1.0]
sizes = st.lists(st.floats(-25, 25) | st.floats(-1e-4, 1e-4), max_size=40)


def counted(values):
    return spread(torch.tensor([values], dtype=torch.float64), torch.ones(1, len(values)))


def test_the_bins_reach_to_where_log_ratios_are_held():
    assert BOUNDS[-1] == MAX_LOG_RATIO
    assert list(BOUNDS) == sorted(BOUNDS)
    assert BOUNDS[0] < 2e-6


def test_nothing_under_the_mask_is_counted():
    values = torch.tensor([[0.5, math.nan, -0.5, math.inf]])
    assert sum(spread(values, torch.tensor([[1, 0, 1, 0]]))) == 2


@given(first=sizes, second=sizes)
@settings(max_examples=40, deadline=None)
def test_parts_merge_to_the_whole(first, second):
    assert merge(counted(first), counted(second)) == counted(first + second)


@given(values=sizes.filter(bool))
@settings(max_examples=60, deadline=None)
def test_a_quantile_is_right_to_within_its_bin(values):
    found = quantiles(counted(values), AT)
    held = np.minimum(np.abs(values), MAX_LOG_RATIO)
    exact = np.quantile(held, AT, method="inverted_cdf")
    assert found == sorted(found)
    for estimate, value in zip(found, exact, strict=True):
        assert value / 1.19 - BOUNDS[0] <= estimate * (1 + 1e-12)
        assert estimate <= value * 1.19 + BOUNDS[0]


def test_a_quantile_is_interpolated_within_its_bin():
    counts = [0] * len(BOUNDS)
    counts[10] = 4
    middle = (BOUNDS[9] + BOUNDS[10]) / 2
    assert quantiles(counts, [0.0, 0.5, 1.0]) == pytest.approx([BOUNDS[9], middle, BOUNDS[10]])


def test_no_tokens_have_no_spread():
    assert quantiles(counted([]), AT) == [0.0] * len(AT)


def test_on_policy_the_spread_is_within_rounding():
    assert max(quantiles(counted([0.0] * 8), AT)) <= BOUNDS[0]


@pytest.mark.parametrize("share", [-0.1, 1.5, math.nan])
def test_a_quantile_lies_between_0_and_1(share):
    with pytest.raises(ValueError, match="between 0 and 1"):
        quantiles([1] * len(BOUNDS), [share])


@pytest.mark.parametrize("module", ["spread", "overlong"])
def test_reading_needs_no_torch(module):
    code = f"import sys, asyncflow.algorithms.{module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
