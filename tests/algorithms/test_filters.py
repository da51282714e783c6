import pytest
import torch

from asyncflow.algorithms.filters import FILTERS

EXPECTED = {
    "finished": [True, False, True],
    "signal": [True, False, True],
    "positive": [True, False, False],
    "negative": [False, False, True],
}


@pytest.mark.parametrize("name", FILTERS)
def test_a_filter_chooses_its_rows(name):
    columns = {"advantage": torch.tensor([0.5, 0.0, -1.0]), "truncated": torch.tensor([False, True, False])}
    assert FILTERS[name](columns).tolist() == EXPECTED[name]


@pytest.mark.parametrize("name", ["signal", "positive", "negative"])
def test_advantages_of_tokens_are_filtered_token_by_token(name):
    assert FILTERS[name]({"advantage": torch.tensor([[0.5, 0.0, -1.0]])}).tolist() == [EXPECTED[name]]


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32, torch.int64])
def test_a_flag_may_be_a_number(dtype):
    assert FILTERS["finished"]({"truncated": torch.tensor([0, 1], dtype=dtype)}).tolist() == [True, False]
