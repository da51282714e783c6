"""Runs whose trainer is several processes."""

import pytest

from asyncflow import Flow
from tests.system.test_modes import LONG, ROWS, check_bound, trained
from tests.system.test_resume import until
from tests.system.test_run import timeless

pytestmark = pytest.mark.timeout(1200)


WHOLE = {"algorithm": "reinforce++", "kl_coef": 0.1, "entropy_coef": 0.01, "aggregate": "seq-mean-token-mean"}
"""A loss that must know all rows of a step: its advantages are whitened, and one part of it leaves rows out."""


@pytest.mark.parametrize("more", [{}, {**WHOLE, "filters": {"entropy": ["positive"]}}], ids=["added", "whole"])
def test_two_ranks_train_as_one_does(pipeline, more):
    path = pipeline(mode="separated", warmup={"steps": 1}, train={"steps": 2, **more})
    one, two = (
        timeless(Flow.from_yaml(path, f"train.data_parallel={ranks}").start().wait(600).folder) for ranks in (1, 2)
    )
    assert [record["kind"] for record in one] == [record["kind"] for record in two]
    for mine, theirs in zip(one, two, strict=True):
        assert {key: value for key, value in theirs.items() if isinstance(value, str)} == {
            key: value for key, value in mine.items() if isinstance(value, str)
        }
        numbers = [{key: value for key, value in each.items() if isinstance(value, float)} for each in (mine, theirs)]
        assert numbers[1] == pytest.approx(numbers[0], rel=1e-3, abs=1e-5)


def test_two_ranks_are_stopped_and_go_on_within_the_bound(pipeline):
    flow = Flow.from_yaml(pipeline(**{**LONG, "on_stale": "requeue"}), "train.data_parallel=2", "train.steps=6").start()
    until(lambda: len(flow.metrics.of("step")) >= 2 or flow.phase == "ended")
    flow.stop()
    assert not flow.wait(300)["complete"]
    assert Flow.resume(flow.folder).start().wait(600)["complete"]
    rows = trained(flow.folder)
    check_bound(rows, 1)
    assert len({(row["group_id"], row["rollout_id"]) for row in rows}) == len(rows) == 6 * ROWS
