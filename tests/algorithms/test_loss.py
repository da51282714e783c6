import math

import numpy as np
import pytest
import torch

from asyncflow.algorithms.aggregate import AGGREGATES, denominators
from asyncflow.algorithms.loss import PolicyLoss, SftLoss, policy_loss
from asyncflow.algorithms.options import CORRECTIONS, resolve
from asyncflow.algorithms.policy import pg
from asyncflow.algorithms.report import combine, metrics
from asyncflow.backends.base import MicroBatch, Scored

GENERATOR = torch.Generator().manual_seed(0)
B, R = 6, 5
mask = (torch.rand(B, R, generator=GENERATOR) < 0.7).float()
mask[3] = 0
logprobs = -torch.rand(B, R, generator=GENERATOR) * 3
columns = {
    "rollout_logprobs": logprobs + 0.3 * torch.randn(B, R, generator=GENERATOR),
    "ref_logprobs": logprobs + 0.3 * torch.randn(B, R, generator=GENERATOR),
    "advantage": torch.randn(B, generator=GENERATOR),
    "ages": torch.randint(0, 3, (B, R), generator=GENERATOR).float(),
    "truncated": torch.tensor([1.0, 0, 0, 0, 1, 0]),
}
entropy = torch.rand(B, R, generator=GENERATOR)
OPTIONS = resolve("grpo", {"kl_coef": 0.1, "entropy_coef": 0.01})
LOSSES = [
    {"loss": "ppo", "dual_clip": 2.0, "kl_unbiased": True},
    {"loss": "gspo", "off_policy": "a3po"},
    {"loss": "gspo-token", "off_policy": "reject", "off_policy_reduce": "max", "off_policy_high": 1.3},
    {"loss": "cispo", "off_policy": "decoupled", "off_policy_high": 1.1},
    {"loss": "pg", "off_policy": "tis", "off_policy_level": "sequence", "filters": {"policy": ["finished"]}},
    {"loss": "ppo", "off_policy": "icepop", "off_policy_low": 0.9, "off_policy_high": 1.1},
]


def run(loss, rows=slice(None), poison=None, width=R):
    def shaped(values):
        values = values[rows]
        if values.ndim == 1:
            return values
        values = values if poison is None else values.masked_fill(mask[rows] == 0, poison)
        return torch.nn.functional.pad(values, (0, width - R), value=poison or 0.0)

    kept = torch.nn.functional.pad(mask[rows], (0, width - R))
    leaf = shaped(logprobs).requires_grad_()
    size = len(kept)
    tokens = torch.zeros(size, width + 1, dtype=torch.int64)
    batch = MicroBatch(tokens, tokens, kept, {n: shaped(c) for n, c in columns.items()}, np.arange(size))
    value, report = loss(Scored(leaf, shaped(entropy)), batch)
    value.backward()
    assert sum(report.get("spread", [report["tokens"]])) == report["tokens"]
    return float(value.detach()), leaf.grad[:, :R], report


def numbers(report):
    """A report without its counts, which `approx` does not compare."""
    return {name: value for name, value in report.items() if name != "spread"}


@pytest.mark.parametrize("how", AGGREGATES)
def test_micro_batches_add_up_to_the_step(how):
    loss = policy_loss({**OPTIONS, "aggregate": how}, denominators(mask), max_response_tokens=R)
    value, gradient, report = run(loss)
    parts = [run(loss, slice(start, start + 2)) for start in range(0, B, 2)]
    assert sum(part[0] for part in parts) == pytest.approx(value)
    assert torch.allclose(torch.cat([part[1] for part in parts]), gradient, atol=1e-7)
    together = combine(part[2] for part in parts)
    assert numbers(together) == pytest.approx(numbers(report))
    assert together["spread"] == report["spread"]


@pytest.mark.parametrize("own", LOSSES, ids=str)
def test_whatever_is_chosen_micro_batches_add_up(own):
    loss = policy_loss({**OPTIONS, **own}, denominators(mask), R)
    value, gradient, report = run(loss)
    parts = [run(loss, slice(start, start + 2)) for start in range(0, B, 2)]
    assert sum(part[0] for part in parts) == pytest.approx(value)
    assert torch.allclose(torch.cat([part[1] for part in parts]), gradient, atol=1e-7)
    assert numbers(combine(part[2] for part in parts)) == pytest.approx(numbers(report))


@pytest.mark.parametrize("poison", [200.0, math.nan, math.inf, -9999.0])
@pytest.mark.parametrize("own", [{}, *LOSSES], ids=str)
def test_values_under_the_mask_and_padding_never_count(own, poison):
    loss = policy_loss({**OPTIONS, **own}, denominators(mask), R)
    value, gradient, report = run(loss)
    dirty, dirty_gradient, dirty_report = run(loss, poison=poison, width=R + 3)
    # Only the order of a sum may differ, in which a wider row is added up.
    assert dirty == pytest.approx(value, rel=1e-6)
    assert torch.allclose(dirty_gradient, gradient, rtol=1e-5, atol=1e-9)
    assert numbers(dirty_report) == pytest.approx(numbers(report), rel=1e-6)
    assert dirty_report["spread"] == report["spread"]


def test_the_loss_is_the_sum_of_its_parts():
    _, _, report = run(policy_loss(OPTIONS, denominators(mask), R))
    assert report["loss"] == pytest.approx(report["policy_loss"] + report["kl_loss"] + report["entropy_loss"])
    assert report["entropy_loss"] == pytest.approx(-0.01 * float((entropy * mask).sum() / mask.sum()))


def test_metrics_are_means_over_the_trained_tokens():
    _, _, report = run(policy_loss(OPTIONS, denominators(mask), R))
    step = metrics(report)
    gap = ((logprobs - columns["rollout_logprobs"]).abs() * mask).flatten()
    assert step["logprob_gap_mean"] == pytest.approx(float(gap.sum() / mask.sum()), rel=1e-5)
    assert step["logprob_gap_max"] == pytest.approx(float(gap.max()), rel=1e-5)
    assert 0 <= step["clip_share"] <= 1
    assert set(step) == {
        "loss", "policy_loss", "kl_loss", "entropy_loss", "ratio_mean", "ratio_max", "clip_share", "logprob_gap_mean",
        "logprob_gap_max", "logprob_gap_p50", "logprob_gap_p90", "logprob_gap_p99", "kl", "entropy", "trained_tokens",
    }  # fmt: skip


def test_maxima_combine_by_maximum():
    assert combine([{"gap": 1.0, "gap_max": 1.0}, {"gap": 2.0, "gap_max": 0.5}]) == {"gap": 3.0, "gap_max": 1.0}


def test_every_option_reaches_the_loss():
    step = denominators(mask)
    base = run(policy_loss(OPTIONS, step, R))[0]
    others = {"clip_low": 0.01, "clip_high": 0.01, "kl_coef": 0.5, "kl": "k1", "entropy_coef": 0.5,
              "aggregate": "seq-mean-token-sum"}  # fmt: skip
    for name, value in others.items():
        assert run(policy_loss({**OPTIONS, name: value}, step, R))[0] != base, name
    norm = {**OPTIONS, "aggregate": "seq-mean-token-sum-norm"}
    assert run(policy_loss({**norm, "aggregate_length": 2}, step, R))[0] != run(policy_loss(norm, step, R))[0]


REACHING = {
    "loss": ["gspo", "gspo-token", "cispo", "pg"],
    "dual_clip": [1.01],
    "kl_in": ["reward"],
    "kl_unbiased": [True],
    "filters": [{part: ["positive"]} for part in ("policy", "kl", "entropy")],
    "off_policy": list(CORRECTIONS),
}
BESIDE = {
    "off_policy_low": ({"off_policy": "icepop"}, 0.95),
    "off_policy_high": ({"off_policy": "decoupled"}, 0.9),
    "off_policy_level": ({"off_policy": "tis"}, "sequence"),
    "off_policy_metric": ({"off_policy": "reject", "off_policy_high": 0.98}, "k3"),
    "off_policy_reduce": ({"off_policy": "reject", "off_policy_high": 1.1}, "sum"),
}


def test_every_choice_reaches_the_loss():
    step = denominators(mask)
    pairs = [(name, {}, value) for name, values in REACHING.items() for value in values]
    pairs += [(name, *both) for name, both in BESIDE.items()]
    for name, beside, value in pairs:
        base = {**OPTIONS, "off_policy_high": 1.05, **beside}
        one, other = (run(policy_loss(each, step, R)) for each in (base, {**base, name: value}))
        assert one[0] != other[0] or not torch.allclose(one[1], other[1], rtol=1e-4), (name, value)


def test_what_is_rejected_stays_in_what_the_loss_is_divided_by():
    chosen = {**OPTIONS, "off_policy": "reject", "off_policy_low": 0.9, "off_policy_high": 1.1, "entropy_coef": 0.0}
    _, gradient, report = run(policy_loss({**chosen, "kl_coef": 0.0, "loss": "pg"}, denominators(mask), R))
    ratio = (logprobs - columns["rollout_logprobs"]).exp()
    kept = (mask != 0) & (ratio >= 0.9) & (ratio <= 1.1)
    assert report["rejected"] == float((mask != 0).sum() - kept.sum()) > 0
    expected = -torch.where(kept, columns["advantage"][:, None], 0.0) / mask.sum()
    assert torch.allclose(gradient, expected, atol=1e-7)


def test_a_loss_of_the_users_own_is_called_as_the_others_are():
    def own(logprobs, old, advantages, mask, clip_low, clip_high):
        assert (clip_low, clip_high) == (0.1, 0.3)
        return pg(logprobs, old, 2 * advantages, mask, clip_low, clip_high)

    options = {**OPTIONS, "clip_low": 0.1, "clip_high": 0.3, "kl_coef": 0.0, "entropy_coef": 0.0}
    step = denominators(mask)
    twice = run(policy_loss({**options, "loss": "mine.py:own"}, step, R, own))[1]
    assert torch.allclose(twice, 2 * run(policy_loss({**options, "loss": "pg"}, step, R))[1])


def test_a_loss_of_the_users_own_is_held_to_what_it_must_return():
    options, step = {**OPTIONS, "loss": "mine.py:own"}, denominators(mask)
    with pytest.raises(ValueError, match=r"train.loss mine.py:own must return PolicyTerms of shape \(6, 5\)"):
        run(policy_loss(options, step, R, lambda logprobs, *rest: logprobs))

    def every(*given):
        return pg(*given)._replace(clipped=torch.ones(B, R, dtype=torch.bool))

    report = run(policy_loss(options, step, R, every))[2]
    assert report["clipped"] == report["tokens"]


def test_an_entropy_bonus_needs_an_entropy():
    batch = MicroBatch(torch.zeros(B, R), torch.zeros(B, R), mask, columns, np.arange(B))
    with pytest.raises(ValueError, match="no entropy"):
        PolicyLoss(denominators(mask), entropy_coef=0.1)(Scored(logprobs, None), batch)


def test_sft_is_the_mean_over_tokens():
    value, gradient, report = run(SftLoss(denominators(mask)), poison=math.nan)
    assert value == pytest.approx(float(-(logprobs * mask).sum() / mask.sum()))
    assert torch.allclose(gradient, -mask / mask.sum())
    assert metrics(report)["nll"] == pytest.approx(value)
