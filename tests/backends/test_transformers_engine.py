"""What is particular to the engine on transformers; what every engine must do is in test_infer_conformance."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from asyncflow.backends import infer_engine, train_engine
from asyncflow.backends.base import Request, Sampling
from asyncflow.backends.infer.transformers import TransformersEngine
from asyncflow.backends.models import new_model
from asyncflow.backends.train.torch import TorchEngine
from asyncflow.errors import ConfigError, WeightsError
from tests.backends.tiny import OPTIM, SPEC, answer, naive_logprobs, prompts, requests, spec, weights


def engine(model=SPEC, max_inflight=16, **options):
    made = TransformersEngine(model, max_inflight=max_inflight, options=options)
    made.stage_weights(0, weights(model))
    made.apply_weights(0)
    return made


def test_engines_are_found_by_name():
    assert infer_engine("transformers") is TransformersEngine
    assert train_engine("torch") is TorchEngine


def test_greedy_equals_generate_token_for_token():
    asked, model = requests(prompts(8), temperature=0, max_tokens=12), new_model(SPEC)
    for key, completion in answer(engine(), asked).items():
        whole = model.generate(
            torch.from_numpy(asked[key].prompt)[None],
            do_sample=False,
            max_new_tokens=12,
            eos_token_id=None,
            pad_token_id=0,
        )
        assert completion.tokens.tolist() == whole[0, len(asked[key].prompt) :].tolist()


@pytest.mark.parametrize(
    "config",
    [
        {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1},
        {"num_key_value_heads": 4},
        {"tie_word_embeddings": False},
        {"model_type": "llama"},
    ],
)
def test_other_kinds_of_model_work(config):
    model = spec(**config)
    asked = requests([*prompts(5), *prompts(5)], max_tokens=12)
    found, whole = answer(engine(model, max_inflight=4), asked), new_model(model)
    for request in asked:
        one = found[request.key]
        np.testing.assert_allclose(one.logprobs, naive_logprobs(whole, request.prompt, one.tokens), atol=1e-4)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_keys_are_recomputed_where_rows_cannot_join_a_cache(temperature):
    kinds = [spec(seed=s, use_sliding_window=True, sliding_window=4, max_window_layers=1) for s in (3, 3, 9)]
    asked = requests(prompts(6), max_tokens=20, temperature=temperature)
    made, models = engine(kinds[0]), [new_model(kind) for kind in kinds]
    made.submit([replace(one, sampling=replace(one.sampling, max_tokens=4 + 8 * i)) for i, one in enumerate(asked[:2])])
    made.submit(asked[2:])
    waiting = made.results(range(6))
    found = {c.key: c for c in next(waiting)}
    for version in (1, 2):
        made.stage_weights(version, weights(kinds[version]))
        made.apply_weights(version, recompute=True)
        found.update((c.key, c) for c in next(waiting))
    found.update((c.key, c) for completions in waiting for c in completions)
    for one in asked:
        for version in np.unique(found[one.key].versions):
            span, tokens = found[one.key].versions == version, found[one.key].tokens
            expected = naive_logprobs(models[version], one.prompt, tokens, temperature or 1.0)
            np.testing.assert_allclose(found[one.key].logprobs[span], expected[span], atol=2e-5)
    assert {tuple(np.unique(c.versions)) for c in found.values()} == {(0,), (0, 1), (0, 1, 2)}


def test_eager_attention_gives_the_same_numbers():
    asked = requests(prompts(6))
    eager, fused = answer(engine(attention="eager"), asked), answer(engine(), asked)
    assert all(np.allclose(eager[key].logprobs, fused[key].logprobs, atol=1e-5) for key in eager)


@pytest.mark.parametrize(
    "build",
    [
        lambda options: TransformersEngine(SPEC, max_inflight=1, options=options),
        lambda options: TorchEngine(SPEC, optim=OPTIM, temperature=1.0, options=options),
    ],
)
def test_an_unknown_option_is_refused_with_the_nearest_name(build):
    with pytest.raises(ConfigError, match=r"attentoin.*did you mean attention"):
        build({"attentoin": "sdpa"})


def test_a_temperature_of_zero_cannot_be_trained_at():
    with pytest.raises(ConfigError, match="above 0"):
        TorchEngine(SPEC, optim=OPTIM, temperature=0.0, options={})


def test_one_name_of_a_tied_tensor_is_enough_and_two_must_agree():
    made, tensors = engine(), weights(spec(seed=9))
    made.stage_weights(1, [pair for pair in tensors if pair[0] != "lm_head.weight"])
    made.apply_weights(1)
    whole = answer(engine(spec(seed=9)), requests(prompts(3)))
    assert all(np.array_equal(c.tokens, whole[k].tokens) for k, c in answer(made, requests(prompts(3))).items())
    with pytest.raises(WeightsError, match="tied here, but differ"):
        made.stage_weights(2, [(n, t + 1 if n == "lm_head.weight" else t) for n, t in tensors])


def test_exported_weights_give_identical_logits():
    trained, rollout = TorchEngine(SPEC, optim=OPTIM, temperature=1.0, options={}), engine()
    rollout.stage_weights(1, trained.export_weights())
    rollout.apply_weights(1)
    state = dict(trained.export_weights())
    assert all(torch.equal(state[name], tensor) for name, tensor in rollout._model.state_dict().items())


def test_bfloat16_generates():
    found = answer(engine(replace(SPEC, dtype="bfloat16")), requests(prompts(4)))
    assert all(np.isfinite(c.logprobs).all() for c in found.values())


def test_long_responses_outgrow_their_first_room_and_leave_it():
    model = spec(max_position_embeddings=512)
    asked = [Request(i, p, Sampling(max_tokens=3 + 30 * i), i) for i, p in enumerate(prompts(5))]
    found, whole = answer(engine(model, max_inflight=3), asked), new_model(model)
    assert [len(found[i].tokens) for i in range(5)] == [3, 33, 63, 93, 123]
    for request in asked:
        one = found[request.key]
        np.testing.assert_allclose(one.logprobs, naive_logprobs(whole, request.prompt, one.tokens), atol=1e-3)


def test_a_failure_reaches_everyone():
    made = engine()
    made.submit(requests(prompts(2)))
    made._model.forward = None
    with pytest.raises(TypeError):
        next(made.results([0]))
    with pytest.raises(RuntimeError, match="failed while it computed"):
        next(made.results([1]))
