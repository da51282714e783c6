"""Runs whose trainer and reference pack rows."""

import pytest

from asyncflow import Flow
from tests.system.test_run import timeless

pytestmark = pytest.mark.timeout(600)


def test_a_packed_run_gives_the_numbers_of_a_padded_one(pipeline):
    path = pipeline(warmup={"steps": 1}, train={"steps": 2, "kl_coef": 0.1})
    padded, packed = (
        timeless(Flow.from_yaml(path, f"train.packing={on}").start().wait(600).folder) for on in ("false", "true")
    )
    assert [record["kind"] for record in padded] == [record["kind"] for record in packed]
    for mine, theirs in zip(padded, packed, strict=True):
        numbers = [{key: value for key, value in each.items() if isinstance(value, float)} for each in (mine, theirs)]
        assert numbers[1] == pytest.approx(numbers[0], rel=1e-3, abs=1e-5)
    assert any(record.get("kl") for record in packed)
