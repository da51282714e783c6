"""What every inference engine must do with responses that run while it is paused, or takes new weights."""

import threading
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from asyncflow.backends.base import Request, Sampling
from asyncflow.backends.models import new_model
from asyncflow.errors import QueueClosed, WeightsError
from tests.backends.tiny import (
    SPEC,
    VOCABULARY,
    agree,
    answer,
    mixed_logprobs,
    naive_logprobs,
    prompts,
    requests,
    spec,
    weights,
)

ARCHITECTURES = [{}, {"model_type": "llama"}]
KINDS = pytest.mark.parametrize("config", ARCHITECTURES, ids=["qwen2", "llama"])
RECOMPUTE = pytest.mark.parametrize("recompute", [False, True], ids=["keep", "recompute"])


def many(count=9, **sampling):
    """Requests of several lengths, some of which end at a stop token."""
    asked = requests(prompts(count), **{"max_tokens": 40, "stop_tokens": (4,), **sampling})
    return [replace(one, sampling=replace(one.sampling, max_tokens=40 - i)) for i, one in enumerate(asked)]


def after(engine, tokens, key=900):
    """Return when the requests that run have about so many tokens more, and have the engine pause."""
    engine.submit([Request(key, np.array([3]), Sampling(max_tokens=tokens), 0)])
    assert len(list(engine.results([key]))) == 1
    engine.pause()


def interrupted(engine, asked, updates, recompute, late=()):
    """Answer requests while the weights change: each update is a version and its tensors, after three tokens more.

    Those that are late are submitted at the first update.
    """
    engine.submit(asked)
    for number, (version, tensors) in enumerate(updates):
        after(engine, 3, 900 + number)
        engine.stage_weights(version, tensors)
        if number == 0:
            engine.submit(late)
        assert engine.apply_weights(version, recompute=recompute) == version
        engine.resume()
    return {c.key: c for completions in engine.results([one.key for one in (*asked, *late)]) for c in completions}


@RECOMPUTE
@KINDS
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_same_weights_under_a_new_version_change_no_token(make, config, temperature, recompute):
    model = spec(**config)
    asked, updates = many(temperature=temperature), [(version, weights(model)) for version in (1, 5)]
    found = interrupted(make(model, max_inflight=12), asked, updates, recompute)
    agree(dict(sorted(found.items())), dict(sorted(answer(make(model), asked).items())))
    assert {tuple(np.unique(c.versions)) for c in found.values()} >= {(0, 1, 5)}


@RECOMPUTE
def test_requests_that_wait_join_those_that_were_interrupted(make, recompute):
    asked, updates = many(14), [(version, weights()) for version in (1, 2, 3)]
    found = interrupted(make(max_inflight=6), asked[:4], updates, recompute, late=asked[4:])
    agree(dict(sorted(found.items())), dict(sorted(answer(make(), asked).items())))


def versions_of(config):
    """Three models of one kind."""
    return {version: spec(seed=version + 3, **config) for version in range(3)}


@KINDS
def test_recomputed_keys_are_those_of_one_pass_over_all_before(make, config):
    kinds, asked = versions_of(config), many()
    updates = [(version, weights(kinds[version])) for version in (1, 2)]
    found = interrupted(make(kinds[0], max_inflight=12), asked, updates, recompute=True)
    models = {version: new_model(kind) for version, kind in kinds.items()}
    for one, completion in ((one, found[one.key]) for one in asked):
        for version in np.unique(completion.versions):
            span = completion.versions == version
            expected = naive_logprobs(models[version], one.prompt, completion.tokens)
            np.testing.assert_allclose(completion.logprobs[span], expected[span], atol=2e-5)
    assert max(len(np.unique(c.versions)) for c in found.values()) == 3


@KINDS
def test_kept_keys_are_those_that_each_token_was_read_with(make, config):
    kinds, asked = versions_of(config), many()
    updates = [(version, weights(kinds[version])) for version in (1, 2)]
    found = interrupted(make(kinds[0], max_inflight=12), asked, updates, recompute=False)
    models, apart = {version: new_model(kind) for version, kind in kinds.items()}, 0.0
    for one, completion in ((one, found[one.key]) for one in asked):
        expected = mixed_logprobs(models, one.prompt, completion.tokens, completion.versions)
        np.testing.assert_allclose(completion.logprobs, expected, atol=2e-5)
        first, last = completion.versions == 0, completion.versions == 2
        whole = naive_logprobs(models[0], one.prompt, completion.tokens)
        np.testing.assert_allclose(completion.logprobs[first], whole[first], atol=2e-5)
        whole = naive_logprobs(models[2], one.prompt, completion.tokens)
        apart = max(apart, *np.abs(completion.logprobs - whole)[last], 0.0)
    assert apart > 0.1  # so that the two ways can be told from each other


@RECOMPUTE
def test_what_begins_after_an_update_meets_no_keys_of_old_weights(make, recompute):
    engine, asked = make(max_inflight=12), many(5)
    interrupted(engine, asked, [(1, weights(spec(seed=9)))], recompute)
    agree(answer(engine, asked), answer(make(spec(seed=9)), asked))


def broken(tensors):
    yield from tensors[:2]
    raise ConnectionError("the transfer broke")


@pytest.mark.parametrize(
    ("update", "error"),
    [
        (lambda engine: engine.stage_weights(1, [*weights(), ("extra", torch.zeros(1))]), WeightsError),
        (lambda engine: engine.stage_weights(1, [(n, t.reshape(-1)[:1]) for n, t in weights()]), WeightsError),
        (lambda engine: engine.stage_weights(1, weights()[:-2]), WeightsError),
        (lambda engine: engine.stage_weights(1, broken(weights())), ConnectionError),
        (lambda engine: engine.apply_weights(7), WeightsError),
        (lambda engine: engine.apply_weights(7, drain=True, recompute=True), WeightsError),
    ],
    ids=["unknown", "misshapen", "missing", "broken", "not staged", "not staged, drained"],
)
def test_an_update_that_fails_leaves_the_engine_as_it_was(make, update, error):
    engine, asked = make(max_inflight=12), many()
    engine.submit(asked)
    after(engine, 3)
    engine.resume()
    with pytest.raises(error):
        update(engine)
    found = {c.key: c for completions in engine.results([one.key for one in asked]) for c in completions}
    assert engine.version == 0
    agree(dict(sorted(found.items())), dict(sorted(answer(make(), asked).items())))


def applying(engine, version, **options):
    """Apply in a thread; returns it, and the list that gets what came of it."""
    came = []

    def apply():
        try:
            came.append(engine.apply_weights(version, **options))
        except QueueClosed as error:
            came.append(error)

    thread = threading.Thread(target=apply, daemon=True)
    thread.start()
    return thread, came


def test_a_drain_lets_what_runs_end_and_nothing_begin_though_nobody_waits_for_results(make):
    engine, asked = make(max_inflight=5), many(12)
    engine.submit(asked[:4])
    after(engine, 3)
    engine.submit(asked[4:])
    engine.stage_weights(1, weights(spec(seed=9)))
    engine.resume()
    assert engine.apply_weights(1, drain=True) == 1
    found = {c.key: c for completions in engine.results([one.key for one in asked]) for c in completions}
    assert {tuple(np.unique(c.versions)) for c in found.values()} == {(0,), (1,)}
    fresh = {one.key: answer(make(spec(seed=9)), [one])[one.key] for one in asked if 1 in found[one.key].versions}
    agree({key: found[key] for key in fresh}, fresh)


def test_drained_no_request_has_two_versions(make):
    engine, asked = make(max_inflight=5), many(12)
    engine.submit(asked[:4])
    after(engine, 3)
    engine.submit(asked[4:])
    engine.stage_weights(1, weights(spec(seed=9)))
    thread, came = applying(engine, 1, drain=True)
    engine.resume()
    found = {c.key: c for completions in engine.results([one.key for one in asked]) for c in completions}
    thread.join(30)
    later = answer(engine, many(2))
    assert came == [1]
    assert {tuple(np.unique(c.versions)) for c in found.values()} <= {(0,), (1,)}
    assert 0 in found[0].versions
    assert {1} == {version for c in later.values() for version in c.versions.tolist()}


def test_a_newer_version_takes_the_place_of_one_that_waits(make):
    engine, asked = make(), many(3)
    engine.submit(asked)
    after(engine, 3)
    engine.stage_weights(1, weights(spec(seed=9)))
    thread, came = applying(engine, 1, drain=True)
    engine.stage_weights(2, weights(spec(seed=10)))
    engine.resume()
    list(engine.results(range(3)))
    thread.join(30)
    assert (came, engine.version, engine.apply_weights(2), engine.apply_weights(1)) == ([2], 2, 2, 2)
    agree(answer(engine, asked), answer(make(spec(seed=10)), asked))


def test_an_update_between_two_tokens_ends_the_wait_of_one_that_drains(make):
    engine = make()
    engine.submit(requests(prompts(3), max_tokens=40))
    after(engine, 3)
    engine.stage_weights(1, weights())
    thread, came = applying(engine, 1, drain=True)
    assert engine.apply_weights(1) == 1
    thread.join(30)
    assert came == [1]
    engine.resume()
    assert {2} == {len(np.unique(c.versions)) for completions in engine.results(range(3)) for c in completions}


def test_an_engine_closes_while_it_drains(make):
    engine = make()
    engine.submit(many(3))
    after(engine, 3)
    engine.stage_weights(1, weights())
    thread, came = applying(engine, 1, drain=True)
    engine.close()
    thread.join(30)
    assert [type(one) for one in came] == [QueueClosed]


def test_capacity_tells_what_runs_and_what_waits(make):
    engine = make(max_inflight=4)
    assert (engine.capacity.running, engine.capacity.waiting, engine.capacity.limit) == (0, 0, 4)
    engine.submit(requests(prompts(7), max_tokens=40))
    engine.pause()
    assert engine.capacity.running + engine.capacity.waiting == 7
    engine.abort(range(7))
    assert engine.capacity.running + engine.capacity.waiting == 0


ACTS = st.one_of(
    st.tuples(st.just("submit"), st.integers(1, 12)),
    st.tuples(st.just("go"), st.integers(1, 4)),
    st.tuples(st.just("apply"), st.booleans()),
    st.tuples(st.just("drain"), st.booleans()),
    st.tuples(st.sampled_from(["pause", "resume", "stage"]), st.none()),
    st.tuples(st.just("abort"), st.integers(0, 20)),
)


class Driver:
    """Does to an engine what a test says, and notes what it asked for."""

    def __init__(self, engine):
        self.engine, self.asked, self.paused = engine, [], False
        self.staged = self.applied = 0
        self.gone = set()

    def act(self, name, value):
        getattr(self, name)(value)

    def submit(self, budget):
        key = len(self.asked)
        prompt = np.random.default_rng(key).integers(2, VOCABULARY, 1 + key % 5)
        self.asked.append(Request(key, prompt, Sampling(max_tokens=budget, stop_tokens=(4,)), seed=key))
        self.engine.submit(self.asked[-1:])

    def go(self, tokens):
        if self.paused:
            return
        after(self.engine, tokens)
        self.engine.resume()

    def pause(self, _):
        self.engine.pause()
        self.paused = True

    def resume(self, _):
        self.engine.resume()
        self.paused = False

    def stage(self, _):
        self.staged += 1
        self.engine.stage_weights(self.staged, weights(spec(seed=self.staged % 3)))

    def apply(self, recompute):
        self.applied = self.engine.apply_weights(self.staged, recompute=recompute)

    def drain(self, _):
        if not self.paused:
            self.applied = self.engine.apply_weights(self.staged, drain=True)

    def abort(self, key):
        self.engine.abort([key])
        self.gone.add(key)

    def finish(self):
        self.resume(None)
        keys = [one.key for one in self.asked]
        return {c.key: c for completions in self.engine.results(keys) for c in completions}


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(acts=st.lists(ACTS, max_size=14))
def test_whatever_happens_every_request_is_answered_once_and_in_order(factory, acts):
    engine = factory(SPEC, max_inflight=3, options={})
    engine.stage_weights(0, weights())
    engine.apply_weights(0)
    driver = Driver(engine)
    for name, value in acts:
        driver.act(name, value)
    found = driver.finish()
    engine.close()
    assert engine.version == driver.applied
    for one in driver.asked:
        completion = found[one.key]
        assert len(completion.tokens) == len(completion.logprobs) == len(completion.versions)
        assert len(completion.tokens) <= one.sampling.max_tokens
        assert (np.diff(completion.versions) >= 0).all()
        assert completion.finish in ({"stop", "length"} if one.key not in driver.gone else {"stop", "length", "abort"})
