"""What holds for every function of tokens: each is a case of one suite."""

import math
from functools import partial
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncflow.algorithms.aggregate import AGGREGATES, aggregate, denominators
from asyncflow.algorithms.corrections import a3po_proximal, decoupled, icepop, reject, tis
from asyncflow.algorithms.kl import KL, unbiased
from asyncflow.algorithms.policy import POLICIES
from asyncflow.algorithms.returns import distill, gae, reinforce, reinforce_baseline
from asyncflow.algorithms.value import value_loss
from asyncflow.algorithms.whiten import moments, whiten

POISON = [200.0, -9999.0, math.inf, -math.inf, math.nan]


def policy(name, advantage="advantage", **options):
    def terms(c, m):
        return POLICIES[name](c["logprobs"], c["old"], c[advantage], m, 0.2, 0.28, **options)

    return terms


def weights(function, *arguments):
    return lambda c, m: function(c["old"], c["behaviour"], m, *arguments)


def divergence(name, weighted):
    def tokens(c, m):
        estimate = KL[name](c["logprobs"], c["ref"], m)
        return (unbiased(estimate, c["logprobs"], c["behaviour"], m) if weighted else estimate,)

    return tokens


SMOOTH = {name: policy(name) for name in ("ppo", "gspo", "pg")}
SMOOTH["ppo-dual"] = policy("ppo", dual_clip=1.5)
SMOOTH["gspo by token"] = policy("gspo", "token_advantage")
SMOOTH |= {name: divergence(name, weighted=False) for name in KL}
SMOOTH |= {f"{name} unbiased": divergence(name, weighted=True) for name in KL}
SMOOTH["value"] = lambda c, m: value_loss(c["logprobs"], c["values"], c["returns"], m, 0.2)
SMOOTH["value unclipped"] = lambda c, m: value_loss(c["logprobs"], c["values"], c["returns"], m, None)

LOSSES = SMOOTH | {
    "cispo": policy("cispo"),
    "gspo-token": policy("gspo-token"),
    "gspo-token by token": policy("gspo-token", "token_advantage"),
    "ppo by token": policy("ppo", "token_advantage", dual_clip=3.0),
}

WEIGHTS = {
    "tis token": weights(tis, 0.5, 2.0, "token"),
    "tis sequence": weights(tis, 0.5, 2.0, "sequence"),
    "icepop": weights(icepop, 0.5, 2.0),
    "decoupled": weights(decoupled, 1.5),
    **{
        f"reject {metric} {reduce}": weights(reject, metric, reduce, -0.5, 1.2)
        for metric in ("ratio", *KL)
        for reduce in ("token", "sum", "mean", "max")
    },
    "a3po": lambda c, m: (a3po_proximal(c["logprobs"], c["behaviour"], m, c["ages"]),),
}

RETURNS = {
    "reinforce": lambda c, m: (reinforce(c["advantage"], c["kl"], m, 0.1, 0.9),),
    "reinforce without kl": lambda c, m: (reinforce(c["advantage"], None, m, 0.1, 1.0),),
    "reinforce-baseline": lambda c, m: (reinforce_baseline(c["advantage"], c["group"], c["kl"], m, 0.1),),
    "gae": lambda c, m: gae(c["advantage"], c["values"], m, 0.99, 0.95),
    "gae with kl": lambda c, m: gae(c["advantage"], c["values"], m, 0.99, 0.95, c["kl"], 0.1),
    "distill": lambda c, m: (distill(c["logprobs"], c["ref"], m, 0.5),),
    "whiten": lambda c, m: (whiten(c["values"], m, moments(c["values"], m)),),
}

ALL = LOSSES | WEIGHTS | RETURNS
BY_ROW = {name: case for name, case in ALL.items() if name not in ("whiten", "reinforce-baseline")}
"""Those whose rows do not feel each other."""


def columns(mask, seed, scale=1.0):
    """Make a column for every name that a case reads."""
    draw = partial(torch.randn, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    rows, width = mask.shape
    tokens = {name: scale * draw(rows, width) for name in ("old", "behaviour", "ref", "values", "returns", "kl")}
    tokens["logprobs"] = tokens["old"] + 0.4 * scale * draw(rows, width)
    tokens["token_advantage"] = draw(rows, width)
    tokens["ages"] = draw(rows, width).abs().floor()
    return {**tokens, "advantage": draw(rows), "group": torch.arange(rows) % 2}


def filled(values, mask, poison, extra=0):
    """Put the poison under the mask, and `extra` columns of it to the right."""
    if values.ndim == 1:
        return values
    return torch.nn.functional.pad(values.masked_fill(mask == 0, poison), (0, extra), value=poison)


def evaluate(case, columns, mask):
    """Return the outputs of a case, and the gradient of the first where it has one."""
    leaf = columns["logprobs"].clone().requires_grad_()
    outputs = case({**columns, "logprobs": leaf}, mask)
    gradient = torch.zeros_like(leaf)
    if outputs[0].requires_grad:
        (gradient,) = torch.autograd.grad(outputs[0].sum(), leaf)
    return [output.detach() for output in outputs], gradient


masks = st.integers(0, 5).flatmap(
    lambda width: st.lists(st.lists(st.booleans(), min_size=width, max_size=width), min_size=1, max_size=6)
).map(lambda rows: torch.tensor(rows, dtype=torch.float32).reshape(len(rows), -1))  # fmt: skip
cases = settings(max_examples=15, deadline=None)


@pytest.mark.parametrize("name", ALL)
@given(mask=masks, seed=st.integers(0, 999), poison=st.sampled_from(POISON), extra=st.integers(0, 3))
@cases
def test_padding_and_what_is_under_the_mask_never_count(name, mask, seed, poison, extra):
    clean = {name: filled(values, mask, 0.0) for name, values in columns(mask, seed).items()}
    dirty = {name: filled(values, mask, poison, extra) for name, values in clean.items()}
    wide = torch.nn.functional.pad(mask, (0, extra))
    expected, gradient = evaluate(ALL[name], clean, mask)
    outputs, found = evaluate(ALL[name], dirty, wide)
    width = mask.shape[1]
    for output, value in zip(outputs, expected, strict=True):
        assert torch.allclose(output[:, :width].double(), value.double(), rtol=1e-12, atol=1e-14)
        assert output.isfinite().all()
    assert not outputs[0][wide == 0].any()
    assert torch.allclose(found[:, :width], gradient, rtol=1e-12, atol=1e-14)
    assert not found[wide == 0].any()


@pytest.mark.parametrize("name", ALL)
@given(mask=masks, seed=st.integers(0, 999), shuffle=st.randoms(use_true_random=False))
@cases
def test_the_order_of_rows_does_not_count(name, mask, seed, shuffle):
    order = list(range(len(mask)))
    shuffle.shuffle(order)
    given = columns(mask, seed)
    outputs, gradient = evaluate(ALL[name], given, mask)
    shuffled, other = evaluate(ALL[name], {name: values[order] for name, values in given.items()}, mask[order])
    for output, value in zip(shuffled, outputs, strict=True):
        assert torch.allclose(output.double(), value[order].double(), rtol=1e-9, atol=1e-12)
    assert torch.allclose(other, gradient[order], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", BY_ROW)
@given(mask=masks, seed=st.integers(0, 999))
@cases
def test_a_row_does_not_feel_the_others(name, mask, seed):
    given = columns(mask, seed)
    whole, _ = evaluate(BY_ROW[name], given, mask)
    for row in range(len(mask)):
        alone, _ = evaluate(BY_ROW[name], {name: v[row : row + 1] for name, v in given.items()}, mask[row : row + 1])
        for output, value in zip(alone, whole, strict=True):
            assert torch.allclose(output[0].double(), value[row].double(), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("how", AGGREGATES)
@pytest.mark.parametrize("name", LOSSES)
@given(mask=masks, seed=st.integers(0, 999), cuts=st.sets(st.integers(1, 5)))
@settings(max_examples=5, deadline=None)
def test_micro_batches_add_up(name, how, mask, seed, cuts):
    step = denominators(mask)
    edges = [0, *sorted(cut for cut in cuts if cut < len(mask)), len(mask)]
    given = columns(mask, seed)

    def share(rows):
        leaf = given["logprobs"][rows].clone().requires_grad_()
        terms = LOSSES[name]({**{n: v[rows] for n, v in given.items()}, "logprobs": leaf}, mask[rows])
        loss = aggregate(terms[0], mask[rows], how, step, length=7)
        return loss.detach(), torch.autograd.grad(loss, leaf)[0]

    whole, gradient = share(slice(None))
    parts = [share(slice(low, high)) for low, high in pairwise(edges)]
    assert torch.allclose(sum(part[0] for part in parts), whole, rtol=1e-9, atol=1e-12)
    assert torch.allclose(torch.cat([part[1] for part in parts]), gradient, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("shape", [(2, 0), (3, 4), (0, 3)])
def test_nothing_to_train_is_zero(name, shape):
    mask = torch.zeros(shape)
    outputs, gradient = evaluate(ALL[name], columns(mask, 0), mask)
    assert all(output.shape == shape for output in outputs)
    assert not outputs[0].any()
    assert not gradient.any()


@pytest.mark.parametrize("name", ALL)
def test_policies_far_apart_stay_finite_in_float32(name):
    mask = torch.ones(4, 6)
    far = {n: v if n == "group" else v.float() for n, v in columns(mask, 3, scale=3000.0).items()}
    outputs, gradient = evaluate(ALL[name], far, mask)
    assert all(output.isfinite().all() for output in outputs)
    assert gradient.isfinite().all()


@pytest.mark.parametrize("name", SMOOTH)
def test_gradients_are_those_of_finite_differences(name):
    mask = torch.ones(4, 5)
    mask[0, 2:], mask[1, 1], mask[2] = 0, 0, 0
    given = columns(mask, 1)
    leaf = given["logprobs"].requires_grad_()
    assert torch.autograd.gradcheck(lambda x: SMOOTH[name]({**given, "logprobs": x}, mask)[0], leaf)


@pytest.mark.parametrize("name", [*LOSSES, *WEIGHTS, *RETURNS])
def test_only_a_loss_has_a_gradient_and_only_towards_the_current_policy(name):
    mask = torch.ones(3, 4)
    given = {n: v.requires_grad_() if v.is_floating_point() else v for n, v in columns(mask, 2).items()}
    output = ALL[name](given, mask)[0]
    assert output.requires_grad == (name in LOSSES)
    if name in LOSSES:
        output.sum().backward()
        assert {n for n, v in given.items() if v.grad is not None} == {"logprobs"}


def test_the_cases_reach_every_branch():
    mask = torch.ones(100, 3)
    given = columns(mask, 0)
    for name in ("ppo", "ppo-dual", "gspo", "cispo", "gspo-token", "value"):
        clipped = LOSSES[name](given, mask)[-1]
        assert clipped.any(), name
        assert not clipped.all(), name
    for name in ("icepop", *(n for n in WEIGHTS if n.startswith("reject"))):
        kept = WEIGHTS[name](given, mask).kept
        assert kept.any(), name
        assert not kept.all(), name
