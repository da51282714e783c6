"""Packed rows against padded ones: the same micro-batch through both layouts, in float64 unless said otherwise."""

import json
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncflow.backends.base import OptimSpec
from asyncflow.backends.models import new_model
from asyncflow.backends.train.packed import Packed
from asyncflow.backends.train.torch import TorchEngine
from asyncflow.errors import ConfigError
from tests.backends.tiny import CONFIG, SPEC, VOCABULARY, batch

SHAPES = {
    "qwen2": CONFIG,
    "llama": {**CONFIG, "model_type": "llama"},
    "gpt2": {"model_type": "gpt2", "vocab_size": VOCABULARY, "n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 64,
             "bos_token_id": 1, "eos_token_id": 1, "initializer_range": 0.4},
    "windows": {**CONFIG, "use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1},
}  # fmt: skip
"""`windows`: a layer that sees everything before, and one that sees the last four tokens."""
ROWS = st.lists(st.tuples(st.integers(1, 9), st.integers(0, 9)), min_size=1, max_size=8)
PLAIN = OptimSpec(max_grad_norm=1e9)


def engine(shape="qwen2", dtype="float64", optim=PLAIN, **options):
    spec = replace(SPEC, config=SHAPES.get(shape, {"model_type": shape}), dtype=dtype)
    return TorchEngine(spec, optim=optim, temperature=0.7, options=options)


@cache
def pair(shape):
    """A padded engine, a packed one, and the state of both before any gradient."""
    padded, packed = engine(shape), engine(shape, packing=True)
    return padded, packed, padded.state()


def lengths(pairs, seed=0):
    rng = np.random.default_rng(seed)
    prompts, responses = ([rng.integers(0, VOCABULARY, size) for size in sizes] for sizes in zip(*pairs, strict=True))
    return batch(
        len(pairs),
        prompt_tokens=prompts,
        response_tokens=responses,
        response_mask=[np.ones(len(r), np.uint8) for r in responses],
        rollout_logprobs=[np.zeros(len(r), np.float32) for r in responses],
    )


def scores(own, part):
    """Return log-probabilities, entropies, loss and the gradient of every parameter, of a loss that weighs all."""
    seen, start = [], own.state()
    weight = torch.linspace(-1, 2, part.mask.numel(), dtype=torch.float64).view(part.mask.shape) * part.mask

    def loss(scored, _):
        seen.extend(values.detach() * part.mask for values in (scored.logprobs, scored.entropy))
        return (weight * (scored.logprobs + 0.3 * scored.entropy**2)).sum(), {}

    own.forward_backward(part, loss, entropy=True)
    own.optim_step(0.0)
    # After one step, Adam's first moment is the gradient, scaled.
    moments = [state["exp_avg"] for state in own.state()["optimizer"]["state"].values()]
    own.load_state(start)
    return [own.logprobs(part) * part.mask, *seen, *moments]


@pytest.mark.parametrize("shape", SHAPES)
@given(pairs=ROWS)
@settings(deadline=None, max_examples=25)
def test_packed_is_padded(shape, pairs):
    padded, packed, start = pair(shape)
    (part,) = packed.micro_batches(lengths(pairs), 1000, [])
    padded.load_state(start)
    packed.load_state(start)
    expected, found = scores(padded, part), scores(packed, part)
    assert len(expected) == len(found)
    for one, other in zip(expected, found, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-10, atol=1e-12)


def test_padding_holds_zeros():
    _, packed, _ = pair("qwen2")
    (part,) = packed.micro_batches(lengths([(3, 5), (1, 0), (2, 1)]), 1000, [])
    assert bool((packed.logprobs(part)[part.mask == 0] == 0).all())


@pytest.mark.parametrize("shape", SHAPES)
def test_no_row_sees_another(shape):
    _, packed, _ = pair(shape)
    pairs = [(4, 6), (4, 5), (3, 6), (4, 4)]
    rows, other = lengths(pairs), lengths(pairs, seed=1)
    for changed in range(len(pairs)):
        mixed = {}
        for name in ("prompt_tokens", "response_tokens"):
            mixed[name] = [(other if row == changed else rows)[name][row] for row in range(len(pairs))]
        (first,) = packed.micro_batches(rows, 100, [])
        (second,) = packed.micro_batches(rows.with_columns(mixed), 100, [])
        before, after = packed.logprobs(first), packed.logprobs(second)
        untouched = torch.from_numpy(first.rows != changed)
        torch.testing.assert_close(after[untouched], before[untouched], rtol=0, atol=1e-12)
        assert not torch.allclose(after[~untouched], before[~untouched], atol=1e-3)


def test_steps_are_those_of_padded_rows():
    optim = OptimSpec(weight_decay=0.1)
    padded, packed = engine(optim=optim), engine(optim=optim, packing=True)
    for seed in range(3):
        rows = batch(12, seed, empty=True)
        for own, budget in ((padded, 60), (packed, 35)):
            for part in own.micro_batches(rows, budget, []):
                own.forward_backward(part, lambda scored, part: (-(scored.logprobs * part.mask).sum(), {}))
            own.optim_step(0.01)
    found = dict(packed.export_weights())
    for name, expected in padded.export_weights():
        torch.testing.assert_close(found[name], expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    ("options", "dtype", "atol"),
    [({"attention": "eager"}, "float32", 1e-5), ({"gradient_checkpointing": True}, "float64", 1e-12),
     ({}, "float32", 1e-5), ({}, "bfloat16", 0.05)],
)  # fmt: skip
def test_packed_is_padded_with_every_attention_and_dtype(options, dtype, atol):
    padded, packed = engine(dtype=dtype, **options), engine(dtype=dtype, packing=True, **options)
    (part,) = packed.micro_batches(lengths([(3, 5), (1, 9), (6, 0), (2, 1), (5, 7)]), 1000, [])
    for one, other in zip(scores(padded, part), scores(packed, part), strict=True):
        torch.testing.assert_close(other, one, rtol=0, atol=atol)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"model_type": "bloom", "n_layer": 1, "n_head": 4}, "bloom does not take packed rows"),
        ({"model_type": "recurrent_gemma", "num_hidden_layers": 3, "num_attention_heads": 4, "lru_width": 16,
          "intermediate_size": 32, "attention_window_size": 8}, "rows of recurrent_gemma would see each other"),
    ],
)  # fmt: skip
def test_a_model_that_cannot_be_packed_is_refused(config, words):
    spec = replace(SPEC, config={"vocab_size": VOCABULARY, "hidden_size": 16, **config})
    TorchEngine(spec, optim=PLAIN, temperature=1.0, options={}).close()
    with pytest.raises(ConfigError, match=words):
        TorchEngine(spec, optim=PLAIN, temperature=1.0, options={"packing": True})


def test_an_attention_that_was_not_tried_is_refused():
    with pytest.raises(ConfigError, match=r"options\.packing: works with attention sdpa and eager, not with flash"):
        Packed(new_model(SPEC), "flash_attention_2")


def test_what_is_saved_does_not_know_of_the_packing(tmp_path):
    engine(packing=True).snapshot()(tmp_path)
    assert "asyncflow" not in json.dumps(json.loads((tmp_path / "config.json").read_text()))
