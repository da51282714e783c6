"""When weights change: each of the three moments, on an engine that generates meanwhile."""

import threading
from contextlib import ExitStack
from queue import SimpleQueue

import numpy as np
import pytest

from asyncflow.backends.base import Request, Sampling
from asyncflow.backends.infer.transformers import TransformersEngine
from asyncflow.errors import QueueClosed, WaitTimeout, WeightsError
from asyncflow.stages.switching import Switching
from tests.backends.tiny import SPEC, answer, prompts, requests, spec, weights

PATIENCE = 30


class Told:
    """What a switching says, to be waited for."""

    def __init__(self):
        self.versions, self.failures, self._changed = [], [], threading.Condition()
        self.traced = []

    def used(self, version):
        self._take(self.versions, version)

    def failed(self, why):
        self._take(self.failures, why)

    def _take(self, kind, what):
        with self._changed:
            kind.append(what)
            self._changed.notify_all()

    def wait(self, until):
        with self._changed:
            assert self._changed.wait_for(until, PATIENCE)


@pytest.fixture
def make():
    with ExitStack() as ends:

        def build(when, **options):
            told, engine = Told(), TransformersEngine(SPEC, max_inflight=2, options={})
            load = options.pop("load", lambda version: weights(spec(seed=3 + version)))

            def stage(version):
                tensors = load(version)
                if tensors is not None:
                    engine.stage_weights(version, tensors)
                return tensors is not None

            made = Switching(engine, stage, told.used, told.failed, told.traced.append, when=when, **options)
            ends.callback(made.join, PATIENCE)
            ends.callback(engine.close)
            ends.callback(made.close)
            made.ask(0)
            made.go(0)
            told.wait(lambda: told.versions == [0])
            return made, engine, told

        yield build


def staged(made, version, shut=False):
    """Wait until a version waits for its moment."""
    with made._changed:
        assert made._changed.wait_for(lambda: made._staged == version and made._shut >= shut, PATIENCE)


def begun(engine):
    """Have a request that is not at its end, of key 1, on an engine that pauses; return what yields its completion."""
    engine.submit([Request(i, np.array([5]), Sampling(max_tokens=n), 0) for i, n in enumerate((3, 20))])
    waiting = engine.results([0, 1])
    assert [c.key for c in next(waiting)] == [0]
    engine.pause()
    return waiting


@pytest.mark.parametrize("when", ["interrupt", "drain", "boundary"])
def test_an_idle_engine_takes_weights_at_once(make, when):
    made, engine, told = make(when)
    made.ask(1)
    told.wait(lambda: told.versions == [0, 1])
    assert engine.version == 1
    for what in ("stage", "apply"):
        spans = [one for one in told.traced if one.name == what]
        assert [one.facts["version"] for one in spans] == [0, 1]
        assert spans[0].started + spans[0].seconds <= spans[1].started
        assert all(one.facts["waited_ms"] >= 0 and one.lane == f"weights: {what}" for one in spans)


def test_where_engines_take_turns_weights_that_are_there_wait_for_theirs(make):
    asked = SimpleQueue()
    made, engine, told = make("interrupt", turn=asked.put)
    assert asked.get(timeout=PATIENCE) == 0
    made.ask(1)
    assert asked.get(timeout=PATIENCE) == 1
    with made.batch():  # nothing else holds it up
        assert answer(engine, requests(prompts(2)))
    assert engine.version == 0
    made.go(1)
    told.wait(lambda: told.versions == [0, 1])
    assert engine.version == 1


def test_interrupted_a_response_has_tokens_of_both(make):
    made, engine, told = make("interrupt")
    with made.batch():
        waiting = begun(engine)
        made.ask(1)
        told.wait(lambda: told.versions == [0, 1])
        engine.resume()
        (second,) = next(waiting)
    assert set(second.versions.tolist()) == {0, 1}


def test_drained_the_newest_weights_come_when_what_ran_has_ended(make):
    made, engine, told = make("drain")
    waiting = begun(engine)
    engine.submit(requests(prompts(2), start=2))
    for version in (1, 2):
        made.ask(version)
        staged(made, version)
    assert told.versions == [0]
    engine.resume()
    found = [c for completions in (*waiting, *engine.results([2, 3])) for c in completions]
    told.wait(lambda: told.versions[-1] == 2)
    made_by = {c.key: set(c.versions.tolist()) for c in found}
    assert made_by[1] == {0}
    assert all(made_by[key] in ({0}, {2}) for key in (2, 3))  # they may have begun before the drain
    assert told.versions == [0, 2]


def test_at_a_boundary_batches_wait_for_those_under_way_and_for_the_newest_weights(make):
    made, engine, told = make("boundary")
    seen = []

    def begin():
        with made.batch():
            seen.append(engine.version)

    with made.batch(), made.batch():
        made.ask(1)
        staged(made, 1, shut=True)
        late = [threading.Thread(target=begin, daemon=True) for _ in range(2)]
        for thread in late:
            thread.start()
        made.ask(2)
        staged(made, 2)
        found = answer(engine, requests(prompts(3)))
        assert {version for c in found.values() for version in c.versions.tolist()} == {0}
    for thread in late:
        thread.join(PATIENCE)
    told.wait(lambda: told.versions[-1] == 2)
    assert (seen, told.versions) == ([2, 2], [0, 2])


def test_one_that_waits_too_long_says_for_what(make):
    made, _, _ = make("boundary", timeout=0.05)
    with made.batch():
        made.ask(1)
        staged(made, 1, shut=True)
        with pytest.raises(WaitTimeout, match=r"version 1, which is to be applied when 1 batches"), made.batch():
            pass


@pytest.mark.parametrize("when", ["drain", "boundary"])
def test_closing_ends_every_wait(make, when):
    made, engine, told = make(when)
    begun(engine)
    caught = []

    def begin():
        with pytest.raises(QueueClosed), made.batch():
            list(engine.results([1]))
        caught.append(True)

    with made.batch():
        made.ask(1)
        staged(made, 1, shut=when == "boundary")
        thread = threading.Thread(target=begin, daemon=True)
        thread.start()
        made.close()
        engine.close()
        thread.join(PATIENCE)
        made.join(PATIENCE)
    assert caught == [True]
    assert not any(thread.is_alive() for thread in made._threads)
    assert (told.versions, told.failures) == ([0], [])


@pytest.mark.parametrize("when", ["interrupt", "drain", "boundary"])
def test_weights_that_cannot_be_taken_are_told_of_and_the_old_ones_go_on(make, when):
    def load(version):
        if version:
            raise WeightsError("it is damaged")
        return weights()

    made, engine, told = make(when, load=load)
    made.ask(1)
    told.wait(lambda: told.failures)
    assert "version 1" in told.failures[0]
    assert "it is damaged" in told.failures[0]
    with made.batch():
        found = answer(engine, requests(prompts(3)))
    assert {version for c in found.values() for version in c.versions.tolist()} == {0}


def test_a_version_that_cannot_be_had_is_passed_over(make):
    made, engine, told = make("interrupt", load=lambda version: None if version == 1 else weights(spec(seed=version)))
    made.ask(1)
    with made.batch():
        answer(engine, requests(prompts(2)))
    made.ask(2)
    told.wait(lambda: told.versions[-1] == 2)
    assert told.versions == [0, 2]
    assert told.failures == []


def test_one_that_is_asked_for_again_while_it_fails_is_tried_again(make):
    begun, go, tries = threading.Event(), threading.Event(), []

    def load(version):
        if version == 1:
            tries.append(version)
            begun.set()
            assert go.wait(PATIENCE)
            if len(tries) == 1:
                return None
        return weights(spec(seed=version))

    made, _, told = make("interrupt", load=load)
    made.ask(1)
    assert begun.wait(PATIENCE)
    made.ask(1)  # the flow has heard that it was given up, before the stage has noted it
    go.set()
    told.wait(lambda: told.versions[-1] == 1)
    assert tries == [1, 1]
