"""Emulated engines: what they make up is whole, and takes the time that the costs say."""

import threading
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncflow.algorithms.aggregate import UNDIVIDED
from asyncflow.algorithms.loss import SftLoss
from asyncflow.backends.costs import InferCosts, Lengths, TrainCosts
from asyncflow.backends.infer.emulated import EmulatedEngine
from asyncflow.backends.train.emulated import EmulatedTrainer
from asyncflow.errors import ConfigError, DataError, QueueClosed, WeightsError
from tests.backends.tiny import OPTIM, SPEC, answer, batch, prompts, requests

FAST = {"decode": 1e-4, "lengths": {"kind": "uniform", "mean": 6}}


def engine(inflight=4, version=1, **options):
    made = EmulatedEngine(SPEC, max_inflight=inflight, options={**FAST, **options})
    if version is not None:
        made.stage_weights(version, [])
        made.apply_weights(version)
    return made


def test_every_request_is_answered_by_its_seed_alone():
    wanted = requests(prompts(9), max_tokens=8, stop_tokens=(1,))
    together = answer(engine(inflight=3), wanted)
    alone = {request.key: answer(engine(), [request])[request.key] for request in wanted}
    assert together.keys() == alone.keys()
    for key, found in together.items():
        assert found.tokens.tolist() == alone[key].tokens.tolist()
        assert 1 <= len(found.tokens) == len(found.logprobs) == len(found.versions) <= 8
        assert (found.finish == "length") == (len(found.tokens) == 8)
        assert (found.tokens[-1] == 1) == (found.finish == "stop")


def test_it_takes_as_long_as_the_costs_say_and_no_more_run_than_may():
    own = engine(inflight=2, decode=0.02, lengths={"mean": 5})
    started = time.monotonic()
    answer(own, requests(prompts(6)))
    assert time.monotonic() - started >= 3 * 5 * 0.02 - 1e-3, "three pairs, one after another"


def test_tokens_carry_the_version_that_was_in_use_and_a_pause_keeps_them():
    own = engine(decode=0.01, lengths={"mean": 30})
    own.submit(requests(prompts(1), max_tokens=50))
    found = []
    waiting = threading.Thread(target=lambda: found.extend(own.results([0])))
    waiting.start()
    time.sleep(0.1)
    own.pause()
    own.stage_weights(2, [])
    own.apply_weights(2)
    own.resume()
    waiting.join(30)
    versions = found[0][0].versions
    assert len(versions) == 30
    assert set(versions.tolist()) == {1, 2}
    assert (np.diff(versions) >= 0).all()


def test_aborted_requests_keep_what_they_have_and_others_take_their_place():
    own = engine(inflight=1, decode=0.005, lengths={"mean": 1000})
    wanted = requests(prompts(3), max_tokens=2000)
    own.submit(wanted)
    own.abort([0, 2])
    ended = next(iter(own.results([0, 2])))
    assert {completion.finish for completion in ended} == {"abort"}
    own.abort([1])
    assert [completion.key for completion in next(iter(own.results([1])))] == [1]


def test_what_cannot_be_is_refused():
    with pytest.raises(WeightsError, match="no weights"):
        answer(engine(version=None), requests(prompts(1)))
    own = engine()
    with pytest.raises(WeightsError, match="version 3 cannot be applied"):
        own.apply_weights(3)
    own.submit(requests(prompts(1)))
    with pytest.raises(DataError, match="request 0 was submitted already"):
        own.submit(requests(prompts(1)))
    own.close()
    with pytest.raises(QueueClosed):
        own.pause()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"decod": 1}, "option 'decod' does not exist"),
        ({"decode": -1}, "decode is a number of at least 0"),
        ({"lengths": {"kind": "pareto"}}, "a kind of fixed, uniform, lognormal"),
        ({"lengths": {"median": 3}}, "lengths has kind, mean, sigma"),
    ],
)
def test_costs_that_are_none_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        InferCosts.of(options)
    assert TrainCosts.of({"token": 2}).token == 2.0


@settings(max_examples=30, deadline=None)
@given(
    st.sampled_from(["fixed", "uniform", "lognormal"]),
    st.floats(1, 200),
    st.lists(st.integers(0, 2**64 - 1), min_size=1),
)
def test_lengths_follow_from_seeds(kind, mean, seeds):
    lengths = Lengths(kind, mean)
    seeds = np.array(seeds, np.uint64)
    found = lengths.draw(seeds)
    assert (found >= 1).all()
    assert (found == lengths.draw(seeds)).all()
    assert (found[::-1] == lengths.draw(seeds[::-1])).all()


def test_long_tails_have_the_mean_that_was_asked_for():
    found = Lengths("lognormal", 64.0, 1.0).draw(np.arange(20_000))
    assert found.mean() == pytest.approx(64, rel=0.05)
    assert found.max() > 10 * 64


def test_a_step_takes_the_time_of_its_tokens_and_makes_a_version():
    own = EmulatedTrainer(SPEC, optim=OPTIM, temperature=1.0, options={"token": 1e-3, "step": 0.05, "weights": 4000})
    rows, started = batch(6), time.monotonic()
    parts = list(own.micro_batches(rows, 40, ["advantage"]))
    for part in parts:
        own.forward_backward(part, SftLoss(UNDIVIDED))
    assert own.optim_step(0.1).version == own.version == 1
    tokens = rows["prompt_tokens"].lengths.sum() + rows["response_tokens"].lengths.sum()
    assert time.monotonic() - started >= tokens * 1e-3 + 0.05 - 1e-3
    ((name, tensor),) = own.export_weights()
    assert (name, tensor.nbytes, float(tensor[0])) == ("weights", 4000, 1.0)
    with pytest.raises(ConfigError):
        EmulatedTrainer(SPEC, optim=OPTIM, temperature=1.0, options={"tokens": 1})


def test_a_drain_lets_what_runs_end_and_nothing_begin():
    own = engine(inflight=1, decode=0.005, lengths={"mean": 20})
    own.submit(requests(prompts(2), max_tokens=50))
    own.stage_weights(2, [])
    assert own.apply_weights(2, drain=True) == 2
    assert own.apply_weights(2) == 2, "again, and nothing happens"
    found = {done.key: set(done.versions.tolist()) for some in own.results([0, 1]) for done in some}
    assert found == {0: {1}, 1: {2}}
    assert own.capacity.running == own.capacity.waiting == 0
