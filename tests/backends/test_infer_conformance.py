"""What every inference engine must do; an adapter joins by adding its factory to ENGINES in conftest."""

import threading
from dataclasses import replace

import numpy as np
import pytest
import torch

from asyncflow.backends.base import Request, Sampling
from asyncflow.backends.models import new_model
from asyncflow.errors import DataError, QueueClosed, WeightsError
from tests.backends.tiny import SPEC, VOCABULARY, agree, answer, naive_logprobs, prompts, requests, spec, weights


def test_completions_have_one_entry_for_each_token(make):
    found = answer(make(version=3), requests(prompts(5)))
    for completion in found.values():
        assert len(completion.tokens) == len(completion.logprobs) == len(completion.versions) > 0
        assert (completion.tokens.dtype, completion.logprobs.dtype) == (np.int64, np.float32)
        assert (completion.versions.dtype, set(completion.versions.tolist())) == (np.int32, {3})


@pytest.mark.parametrize("temperature", [1.0, 0.7, 0.0])
def test_logprobs_are_at_the_sampling_temperature(make, temperature):
    asked = requests(prompts(6), temperature=temperature, top_p=0.9, top_k=7)
    found, model = answer(make(), asked), new_model(SPEC)
    for request in asked:
        one = found[request.key]
        expected = naive_logprobs(model, request.prompt, one.tokens, temperature or 1.0)
        np.testing.assert_allclose(one.logprobs, expected, atol=1e-4)


def test_greedy_is_the_largest_logit_of_a_full_pass(make):
    asked = requests(prompts(6), temperature=0)
    model = new_model(SPEC)
    for key, completion in answer(make(), asked).items():
        whole = torch.from_numpy(np.concatenate([asked[key].prompt, completion.tokens]))[None]
        best = model(input_ids=whole).logits[0, len(asked[key].prompt) - 1 : -1].argmax(-1)
        assert completion.tokens.tolist() == best.tolist()


def test_samples_follow_the_softmax(make):
    prompt, count = prompts(1)[0], 1500
    asked = [Request(i, prompt, Sampling(max_tokens=1), seed=i) for i in range(count)]
    found = answer(make(max_inflight=500), asked)
    with torch.no_grad():
        expected = torch.softmax(new_model(SPEC)(input_ids=torch.from_numpy(prompt)[None]).logits[0, -1], 0).numpy()
    seen = np.bincount([int(c.tokens[0]) for c in found.values()], minlength=VOCABULARY)
    often = expected * count >= 5
    chi_square = ((seen - expected * count) ** 2 / (expected * count))[often].sum()
    assert chi_square < 43  # 99.9 % of a chi-square with 18 degrees of freedom


def test_a_response_ends_with_the_first_stop_token(make):
    asked = requests(prompts(20), stop_tokens=(4, 7), max_tokens=12)
    found = answer(make(), asked)
    for completion in found.values():
        stops = np.isin(completion.tokens, (4, 7))
        assert not stops[:-1].any()
        assert completion.finish == ("stop" if stops[-1] else "length")
        assert stops[-1] or len(completion.tokens) == 12
    assert {completion.finish for completion in found.values()} == {"stop", "length"}


def test_the_budget_covers_the_whole_response(make):
    asked = [replace(r, sampling=replace(r.sampling, max_tokens=1 + i)) for i, r in enumerate(requests(prompts(9)))]
    assert [len(c.tokens) for c in answer(make(), asked).values()] == sorted(range(1, 10))


def test_the_model_s_length_ends_a_response(make):
    room = np.full(60, 5)
    (completion,) = answer(make(), [Request(0, room, Sampling(max_tokens=100), 0)]).values()
    assert (len(completion.tokens), completion.finish) == (4, "length")


@pytest.mark.parametrize(("length", "word"), [(64, "room"), (70, "room"), (0, "empty")])
def test_a_prompt_without_room_is_refused_by_key_and_nothing_is_queued(make, length, word):
    engine = make()
    with pytest.raises(DataError, match=f"request 77 .*{word}"):
        engine.submit([*requests(prompts(1)), Request(77, np.full(length, 3), Sampling(), 0)])
    assert len(answer(engine, requests(prompts(1)))) == 1


@pytest.mark.parametrize("max_inflight", [1, 3, 5, 64])
def test_a_response_does_not_depend_on_the_others_of_its_batch(make, max_inflight):
    asked = requests([*prompts(9), *prompts(4)], stop_tokens=(4,), max_tokens=10)
    agree(answer(make(max_inflight=64), asked), answer(make(max_inflight=max_inflight), asked))


def test_the_same_submission_gives_the_same_numbers(make):
    asked = requests([*prompts(9), *prompts(9)], stop_tokens=(4,), max_tokens=10)
    first, second = answer(make(max_inflight=5), asked), answer(make(max_inflight=5), asked)
    assert list(first) == list(second)
    assert all(np.array_equal(first[key].logprobs, second[key].logprobs) for key in first)


def test_seeds_differ_and_repeat(make):
    prompt, engine = prompts(1)[0], make()
    asked = [Request(i, prompt, Sampling(max_tokens=10), seed=i % 5) for i in range(10)]
    found = answer(engine, asked)
    texts = [tuple(found[i].tokens.tolist()) for i in range(10)]
    assert texts[:5] == texts[5:]
    assert len(set(texts)) == 5


def test_sampling_may_differ_between_rows(make):
    asked = requests(prompts(6))
    mixed = [
        replace(r, sampling=Sampling(temperature=(0, 0.5, 1)[i % 3], top_k=(-1, 3)[i % 2], max_tokens=6))
        for i, r in enumerate(asked)
    ]
    alone = {request.key: answer(make(), [request])[request.key] for request in mixed}
    agree({key: alone[key] for key in sorted(alone)}, dict(sorted(answer(make(), mixed).items())))


def test_weights_change_between_two_tokens_and_versions_tell_where(make):
    engine = make(max_inflight=2)
    first, second = requests(prompts(2), max_tokens=30)
    first = replace(first, sampling=Sampling(max_tokens=3))
    engine.submit([first, second])
    waiting = engine.results([first.key, second.key])
    assert [c.key for c in next(waiting)] == [first.key]
    engine.stage_weights(5, weights(spec(seed=9)))
    assert engine.version == 0
    engine.apply_weights(5)
    assert engine.version == 5
    (completion,) = next(waiting)
    assert completion.versions.tolist() == [0] * 3 + [5] * 27
    before = answer(make(), [second])[second.key]
    assert completion.tokens[:3].tolist() == before.tokens[:3].tolist()
    assert completion.tokens.tolist() != before.tokens.tolist()


def test_an_engine_answers_with_the_weights_it_was_given(make):
    changed = make()
    changed.stage_weights(1, weights(spec(seed=9)))
    changed.apply_weights(1)
    agree(answer(changed, requests(prompts(5))), answer(make(spec(seed=9)), requests(prompts(5))))


def test_staged_weights_are_copies(make):
    engine, tensors = make(), weights(spec(seed=9))
    engine.stage_weights(1, tensors)
    with torch.no_grad():
        for _, tensor in tensors:
            tensor.zero_()
    engine.apply_weights(1)
    agree(answer(engine, requests(prompts(5))), answer(make(spec(seed=9)), requests(prompts(5))))


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (lambda t: [*t, ("model.extra", torch.zeros(1))], "model.extra is unknown"),
        (lambda t: [pair for pair in t if pair[0] != "model.norm.weight"], "model.norm.weight is missing"),
        (lambda t: [(n, v[:1] if n == "model.norm.weight" else v) for n, v in t], "model.norm.weight has shape"),
    ],
)
def test_wrong_weights_are_refused_by_name_and_nothing_changes(make, change, word):
    engine = make()
    with pytest.raises(WeightsError, match=word):
        engine.stage_weights(1, change(weights()))
    with pytest.raises(WeightsError, match="cannot be applied"):
        engine.apply_weights(1)
    assert engine.version == 0
    assert len(answer(engine, requests(prompts(2)))) == 2


def test_versions_only_grow(make):
    engine = make(version=4)
    with pytest.raises(WeightsError, match="older"):
        engine.stage_weights(3, weights())


def test_without_weights_nothing_is_generated(make):
    engine = make(version=None)
    assert engine.version is None
    with pytest.raises(WeightsError, match="no weights"):
        answer(engine, requests(prompts(1)))


def test_aborted_requests_keep_what_they_have(make):
    engine = make(max_inflight=3)
    asked = [replace(r, sampling=Sampling(max_tokens=2 if i == 0 else 40)) for i, r in enumerate(requests(prompts(5)))]
    engine.submit(asked)
    waiting = engine.results(range(5))
    next(waiting)
    engine.abort([1, 4, 99])
    ended = {c.key: c for c in next(waiting)}
    assert {key: (len(c.tokens), c.finish) for key, c in ended.items()} == {1: (2, "abort"), 4: (0, "abort")}
    whole = answer(make(), asked)
    assert ended[1].tokens.tolist() == whole[1].tokens[:2].tolist()
    rest = {c.key: c for completions in waiting for c in completions}
    agree(dict(sorted(rest.items())), {key: whole[key] for key in (2, 3)})


@pytest.mark.parametrize(("stop", "go"), [("pause", "resume"), ("sleep", "wake")])
def test_a_paused_engine_goes_on_where_it_stopped(make, stop, go):
    engine, asked = make(), requests(prompts(3), max_tokens=50)
    engine.submit(asked)
    getattr(engine, stop)()
    found = {}
    thread = threading.Thread(
        target=lambda: found.update((c.key, c) for cs in engine.results(range(3)) for c in cs), daemon=True
    )
    thread.start()
    thread.join(0.1)
    assert not found
    assert thread.is_alive()
    getattr(engine, go)()
    thread.join(30)
    agree(dict(sorted(found.items())), answer(make(), asked))


def test_pause_is_honoured_between_two_tokens(make):
    engine = make(max_inflight=4)
    asked = [replace(r, sampling=Sampling(max_tokens=3 if i == 0 else 50)) for i, r in enumerate(requests(prompts(4)))]
    engine.submit(asked)
    waiting = engine.results(range(4))
    next(waiting)
    found = {}
    thread = threading.Thread(target=lambda: found.update((c.key, c) for cs in waiting for c in cs), daemon=True)
    thread.start()
    engine.pause()
    engine.abort([1])
    engine.resume()
    thread.join(30)
    assert found[1].finish == "abort"
    assert 3 <= len(found[1].tokens) <= 50
    assert len(found[2].tokens) == 50


def test_threads_get_the_results_of_their_own_keys(make):
    engine = make(max_inflight=6)
    asked = requests(prompts(24), max_tokens=9)
    engine.submit(asked)
    found = [{} for _ in range(4)]

    def wait(part):
        for completions in engine.results(range(part, 24, 4)):
            found[part].update((c.key, c) for c in completions)

    threads = [threading.Thread(target=wait, args=(part,), daemon=True) for part in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert [sorted(part) for part in found] == [list(range(part, 24, 4)) for part in range(4)]
    merged = {key: completion for part in found for key, completion in part.items()}
    agree(dict(sorted(merged.items())), dict(sorted(answer(make(max_inflight=24), asked).items())))


def test_requests_may_come_while_others_run(make):
    engine, asked = make(max_inflight=6), requests(prompts(8), max_tokens=9)
    engine.submit(asked[:4])
    short = replace(asked[4], sampling=Sampling(max_tokens=2))
    engine.submit([short])
    next(engine.results([short.key]))
    engine.submit(asked[5:])
    found = {c.key: c for cs in engine.results([0, 1, 2, 3, 5, 6, 7]) for c in cs}
    agree(dict(sorted(found.items())), {k: v for k, v in answer(make(), asked).items() if k != 4})


def test_a_key_is_known_once(make):
    engine, asked = make(), requests(prompts(1))
    engine.submit(asked)
    with pytest.raises(DataError, match="request 0 was submitted already"):
        engine.submit(asked)
    list(engine.results([0]))
    with pytest.raises(DataError, match="request 0 was not submitted"):
        next(engine.results([0]))
    assert len(answer(engine, asked)) == 1


def test_closing_ends_those_who_wait(make):
    engine = make()
    engine.submit(requests(prompts(2)))
    engine.pause()
    caught = []

    def wait():
        with pytest.raises(QueueClosed):
            next(engine.results([0, 1]))
        caught.append(True)

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    engine.close()
    thread.join(30)
    engine.close()
    assert caught == [True]
    with pytest.raises(QueueClosed):
        engine.submit(requests(prompts(1)))
