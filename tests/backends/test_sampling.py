import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncflow.backends.infer.sampling import Knobs, draw, uniforms

logits = torch.tensor([2.0, 0.5, 1.0, -1.0, 0.0])


def knobs(rows, temperature=1.0, top_p=1.0, top_k=-1):
    return Knobs(np.full(rows, temperature, np.float32), np.full(rows, top_p), np.full(rows, top_k))


def drawn(rows=4000, **options):
    uniform = uniforms(np.arange(rows).astype(np.uint64), np.zeros(rows, np.int64))
    return draw(logits.expand(rows, -1), knobs(rows, **options), uniform)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_samples_follow_the_softmax(temperature):
    tokens, logprobs = drawn(temperature=temperature)
    expected = torch.softmax(logits / temperature, 0)
    seen = torch.bincount(tokens, minlength=5).double() / len(tokens)
    chi_square = float(((seen - expected) ** 2 / expected).sum() * len(tokens))
    assert chi_square < 18.5  # 99.9 % of a chi-square with 4 degrees of freedom
    assert torch.allclose(logprobs, expected.log()[tokens], atol=1e-6)


def test_greedy_takes_the_largest_at_temperature_one():
    tokens, logprobs = drawn(rows=3, temperature=0)
    assert tokens.tolist() == [0] * 3
    assert torch.allclose(logprobs, torch.log_softmax(logits, 0)[0].expand(3))


@pytest.mark.parametrize(
    ("top_k", "support"), [(1, {0}), (2, {0, 2}), (3, {0, 1, 2}), (9, {0, 1, 2, 3, 4}), (-1, {0, 1, 2, 3, 4})]
)
def test_top_k_keeps_the_likeliest(top_k, support):
    tokens, logprobs = drawn(top_k=top_k)
    assert set(tokens.tolist()) == support
    assert torch.allclose(logprobs, torch.log_softmax(logits, 0)[tokens], atol=1e-6)


def test_top_p_keeps_the_smallest_set_with_that_mass():
    ordered = torch.softmax(logits, 0).sort(descending=True).values.cumsum(0)
    for kept in range(1, 6):
        for top_p in (float(ordered[kept - 1]) - 1e-4, (float(ordered[kept - 2]) if kept > 1 else 0.0) + 1e-4):
            assert len(set(drawn(top_p=top_p)[0].tolist())) == kept


def test_top_p_works_on_what_top_k_left():
    # Of the two likeliest the first has 73 %: less than 0.74, though it would be 54 % of the whole.
    assert set(drawn(top_k=2, top_p=0.72)[0].tolist()) == {0}
    assert set(drawn(top_k=2, top_p=0.74)[0].tolist()) == {0, 2}


@given(
    rows=st.lists(
        st.tuples(st.sampled_from([0.0, 0.5, 1.0]), st.floats(0.01, 1), st.integers(-1, 6)), min_size=1, max_size=5
    ),
    seed=st.integers(0, 2**64 - 1),
)
@settings(max_examples=25, deadline=None)
def test_a_row_does_not_depend_on_the_others(rows, seed):
    uniform = uniforms(np.full(len(rows), seed, np.uint64), np.arange(len(rows)))
    values = torch.randn(len(rows), 7, generator=torch.Generator().manual_seed(1))
    table = Knobs(*(np.array(column) for column in zip(*rows, strict=True)))
    table = Knobs(table.temperature.astype(np.float32), table.top_p, table.top_k)
    together, _ = draw(values, table, uniform)
    for row in range(len(rows)):
        one = slice(row, row + 1)
        alone, _ = draw(values[one], Knobs(*(column[one] for column in table)), uniform[one])
        assert alone[0] == together[row]


def test_tokens_of_probability_zero_are_never_drawn():
    values = torch.tensor([[-torch.inf, 0.0, -torch.inf, 0.0, -torch.inf]])
    for uniform in (0.0, 0.5, 1 - 2.0**-48):
        token, _ = draw(values, knobs(1), np.array([uniform]))
        assert int(token) in (1, 3)


def test_uniforms_are_uniform_and_differ_by_seed_and_place():
    seeds, places = np.meshgrid(np.arange(200, dtype=np.uint64), np.arange(200))
    values = uniforms(seeds.ravel(), places.ravel())
    assert len(set(values.tolist())) == values.size
    assert values.min() >= 0
    assert values.max() < 1
    counts = np.histogram(values, bins=20, range=(0, 1))[0]
    assert ((counts - 2000) ** 2 / 2000).sum() < 44  # 99.9 % of a chi-square with 19 degrees of freedom
    assert abs(np.corrcoef(values.reshape(200, 200)[:-1].ravel(), values.reshape(200, 200)[1:].ravel())[0, 1]) < 0.03
