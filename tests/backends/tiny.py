"""Models of a few thousand parameters and the batches for them."""

from dataclasses import replace

import numpy as np
import torch
from transformers import DynamicCache

from asyncflow.backends.base import ModelSpec, OptimSpec, Request, Sampling
from asyncflow.backends.models import cache_keyword, new_model
from asyncflow.storage.batch import Batch

VOCABULARY = 19
CONFIG = {
    "model_type": "qwen2",
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
    "initializer_range": 0.4,
}
SPEC = ModelSpec(path=None, config=CONFIG, dtype="float32", seed=3, pad_token=0, eos_token=1)
OPTIM = OptimSpec(weight_decay=0.1, max_grad_norm=1.0)


def spec(seed=3, **config):
    return replace(SPEC, seed=seed, config={**CONFIG, **config})


def weights(model=SPEC):
    return list(new_model(model).state_dict().items())


def prompts(count, seed=0, longest=9):
    rng = np.random.default_rng(seed)
    return [rng.integers(2, VOCABULARY, rng.integers(1, longest + 1)) for _ in range(count)]


def requests(prompt_list, start=0, **sampling):
    options = Sampling(**{"max_tokens": 8, **sampling})
    return [Request(start + i, prompt, options, seed=1000 + i) for i, prompt in enumerate(prompt_list)]


def answer(engine, submitted):
    """Submit, wait for all, and return completions by key."""
    engine.submit(submitted)
    found = {}
    for completions in engine.results([request.key for request in submitted]):
        assert completions
        found.update((completion.key, completion) for completion in completions)
    return found


def agree(first, second):
    """Check that two answers have the same keys, tokens and log-probabilities."""
    assert first.keys() == second.keys()
    for key, one in first.items():
        assert one.tokens.tolist() == second[key].tokens.tolist(), key
        np.testing.assert_allclose(one.logprobs, second[key].logprobs, atol=1e-5)


def batch(rows, seed=0, longest=7, empty=False, **columns):
    """Rows of random prompts and responses with rollout log-probabilities and advantages."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(0 if empty else 1, longest + 1, rows)
    responses = [rng.integers(2, VOCABULARY, length) for length in lengths]
    return Batch(
        {
            "prompt_tokens": prompts(rows, seed),
            "response_tokens": responses,
            "response_mask": [(rng.random(len(r)) < 0.8).astype(np.uint8) for r in responses],
            "rollout_logprobs": [(-3 * rng.random(len(r))).astype(np.float32) for r in responses],
            "advantage": rng.standard_normal(rows).astype(np.float32),
            **columns,
        }
    )


def naive_logprobs(model, prompt, response, temperature=1.0):
    """Log-probabilities of a response by one full, unpadded, uncached pass."""
    ids = torch.from_numpy(np.concatenate([prompt, response]))[None]
    with torch.no_grad():
        logits = model(input_ids=ids).logits[0, len(prompt) - 1 : -1]
    logs = torch.log_softmax(logits.float() / temperature, dim=-1)
    return logs.gather(-1, torch.from_numpy(np.array(response))[:, None])[:, 0].numpy()


def mixed_logprobs(models, prompt, response, versions):
    """Log-probabilities of a response, each token read once by the model of its version, on the keys of those before.

    `models` has a model for each version.
    """
    cache, logs = DynamicCache(config=models[versions[0]].config), []
    read = torch.from_numpy(np.array(prompt))[None]
    for token, version in zip(response.tolist(), versions.tolist(), strict=True):
        with torch.no_grad():
            logits = models[version](input_ids=read, use_cache=True, **{cache_keyword(models[version]): cache}).logits[
                0, -1
            ]
        logs.append(float(torch.log_softmax(logits.float(), dim=-1)[token]))
        read = torch.tensor([[token]])
    return np.array(logs)
