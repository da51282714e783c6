import math

import pytest
import torch

from asyncflow.algorithms.aggregate import aggregate, denominators
from asyncflow.algorithms.corrections import a3po_proximal, decoupled, icepop, reject, tis
from asyncflow.algorithms.policy import ppo_clip

old = torch.tensor([[0.25, 0.25, 0.3, 0.2]], dtype=torch.float64).log()
behaviour = torch.tensor([[0.2, 0.25, 0.6, 0.2]], dtype=torch.float64).log()
behaviour[0, 3] = math.nan
mask = torch.tensor([[1.0, 1.0, 1.0, 0.0]])
RATIOS = [1.25, 1.0, 0.5]


def numbers(tensor, trained=3):
    return pytest.approx(tensor[0, :trained].tolist(), abs=1e-12)


@pytest.mark.parametrize(("low", "high", "expected"), [(0, 2, RATIOS), (0.8, 1.1, [1.1, 1.0, 0.8])])
def test_tis_clamps_each_token(low, high, expected):
    found = tis(old, behaviour, mask, low, high)
    assert expected == numbers(found.weight)
    assert numbers(found.ratio) == RATIOS
    assert found.weight[0, 3] == 0
    assert found.ratio[0, 3] == 1
    assert found.kept.tolist() == [[True, True, True, False]]


@pytest.mark.parametrize(("low", "high", "expected"), [(0, 2, 0.625), (0.7, 2, 0.7), (0, 0.5, 0.5)])
def test_tis_of_a_sequence_is_the_product(low, high, expected):
    found = tis(old, behaviour, mask, low, high, "sequence")
    assert numbers(found.weight) == [expected] * 3
    assert numbers(found.ratio) == [0.625] * 3


def test_icepop_drops_what_lies_outside():
    found = icepop(old, behaviour, mask, 0.6, 1.3)
    assert numbers(found.weight) == [1.25, 1.0, 0.0]
    assert found.kept.tolist() == [[True, True, False, False]]
    assert numbers(found.ratio) == RATIOS


def test_decoupled_caps_from_above_only():
    found = decoupled(old, behaviour, mask, 1.1)
    assert numbers(found.weight) == [1.1, 1.0, 0.5]
    assert found.kept.sum() == 3


LOGS = [math.log(ratio) for ratio in RATIOS]
K1 = [-log for log in LOGS]
K2 = [log * log / 2 for log in LOGS]
K3 = [ratio - 1 - math.log(ratio) for ratio in RATIOS]
ROW = {
    ("ratio", "sum"): 0.625,
    ("ratio", "mean"): 0.625 ** (1 / 3),
    ("ratio", "max"): 1.25,
    **{(name, how): reduce(values) for name, values in (("k1", K1), ("k2", K2), ("k3", K3))
       for how, reduce in (("sum", sum), ("mean", lambda v: sum(v) / 3), ("max", max))},
}  # fmt: skip


@pytest.mark.parametrize(("metric", "how"), ROW)
def test_a_row_is_rejected_exactly_outside_its_range(metric, how):
    value = ROW[metric, how]
    for low, high, kept in [
        (value - 1e-9, value + 1e-9, True),
        (value + 1e-9, math.inf, False),
        (-math.inf, value - 1e-9, False),
    ]:
        found = reject(old, behaviour, mask, metric, how, low, high)
        assert found.kept.tolist() == [[kept, kept, kept, False]]
        assert found.weight.tolist() == [[kept, kept, kept, 0]]


@pytest.mark.parametrize(("metric", "values"), [("ratio", RATIOS), ("k1", K1), ("k2", K2), ("k3", K3)])
def test_tokens_are_rejected_one_by_one(metric, values):
    for position, value in enumerate(values):
        found = reject(old, behaviour, mask, metric, "token", value - 1e-9, value + 1e-9)
        assert found.kept.tolist() == [[i == position for i in range(3)] + [False]]


def test_rejected_tokens_stay_in_the_denominator():
    weights = icepop(old, behaviour, mask, 0.6, 1.3)
    terms = ppo_clip(old, old, torch.tensor([1.0]), mask, 0.2, 0.2)
    loss = aggregate(terms.token_loss * weights.weight, mask, "token-mean", denominators(mask))
    assert float(loss) == pytest.approx(-2.25 / 3)


def test_a_product_beyond_floats_is_held():
    trained = torch.ones(1, 5000)
    far = tis(torch.zeros(1, 5000), torch.full((1, 5000), -1.0), trained, 0.0, math.inf, "sequence")
    assert far.weight.isfinite().all()
    assert far.weight.max() == pytest.approx(math.exp(20), rel=1e-6)


def test_a3po_goes_from_the_behaviour_towards_the_current_policy():
    logprobs = torch.tensor([[-1.0, -1.0, -1.0, -1.0, math.nan]])
    sampled = torch.tensor([[-2.0, -2.0, -2.0, -2.0, math.inf]])
    ages, trained = torch.tensor([[0, 1, 3, -1, -1]]), torch.tensor([[1, 1, 1, 1, 0]])
    assert a3po_proximal(logprobs, sampled, trained, ages).tolist() == [[-2.0, -1.5, -1.25, -2.0, 0.0]]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: tis(old, behaviour, mask, 0, 2, "row"), "token or sequence"),
        (lambda: tis(old, behaviour, mask, 2, 1), "not be greater"),
        (lambda: icepop(old, behaviour, mask, math.nan, 1), "not be greater"),
        (lambda: decoupled(old, behaviour, mask, 0), "greater than 0"),
        (lambda: reject(old, behaviour, mask, "k4", "sum", 0, 1), "ratio, k1, k2, k3"),
        (lambda: reject(old, behaviour, mask, "k1", "min", 0, 1), "sum, mean or max"),
        (lambda: reject(old, behaviour, mask, "k1", "sum", 1, 0), "not be greater"),
    ],
)
def test_what_makes_no_sense_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
