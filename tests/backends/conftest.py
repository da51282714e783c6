"""Every inference engine, for the suites that each of them must pass."""

import pytest

from asyncflow.backends.infer.transformers import TransformersEngine
from tests.backends.tiny import SPEC, weights

ENGINES = [TransformersEngine]


@pytest.fixture(params=ENGINES, ids=lambda factory: factory.__name__)
def factory(request):
    return request.param


@pytest.fixture
def make(factory):
    made = []

    def build(model=SPEC, max_inflight=16, version=0):
        engine = factory(model, max_inflight=max_inflight, options={})
        made.append(engine)
        if version is not None:
            engine.stage_weights(version, weights(model))
            engine.apply_weights(version)
        return engine

    yield build
    for engine in made:
        engine.close()
