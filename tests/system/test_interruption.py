"""Whole runs that take new weights at each of the moments, and what their responses are made of."""

from itertools import pairwise

import pytest

from asyncflow import Flow
from asyncflow.config.load import load
from asyncflow.observe.timeline import read
from benchmarks import engine
from tests.system.test_modes import check_bound, check_ledger, trained
from tests.system.test_run import timeless

pytestmark = pytest.mark.timeout(1200)  # processes start slowly where cores are shared


def changes(mode: str, **more: object) -> dict[str, object]:
    rollout = {"max_inflight": 8, "max_response_tokens": 8}
    return {"mode": mode, "eval": {"rows": 0}, "train": {"steps": 4}, "rollout": rollout, **more}


@pytest.mark.parametrize(
    ("mode", "apply", "more"),
    [
        ("async", "drain", {}),
        ("async", "drain", {"on_stale": "wait"}),
        ("async", "boundary", {"on_stale": "wait", "max_staleness": 2}),
        ("async", "boundary", {"max_staleness": 0}),
        ("streaming", "boundary", {}),
    ],
)
def test_uninterrupted_a_response_has_one_version_and_at_a_boundary_a_group_has(pipeline, mode, apply, more):
    folder = Flow.from_yaml(pipeline(**changes(mode, weights={"apply": apply}, **more))).start().wait(300).folder
    check_ledger(folder, steps=4)
    rows = trained(folder)
    assert all(len(set(row["versions"])) == 1 for row in rows)
    if apply == "boundary":
        assert len({(row["group_id"], row["versions"][0]) for row in rows}) == 16
    if mode == "streaming" or more:  # otherwise what is too old is masked
        check_bound(rows, {"streaming": 0}.get(mode, int(more.get("max_staleness", 1))))
    assert len({row["versions"][0] for row in rows}) > 1


def test_a_run_may_have_the_keys_of_interrupted_responses_recomputed(pipeline):
    path = pipeline(**changes("async", weights={"kv": "recompute"}))
    folder = Flow.from_yaml(path).start().wait(300).folder
    check_ledger(folder, steps=4)
    assert all(step["staleness_max"] <= 1 for step in timeless(folder) if step["kind"] == "step")


def test_replicas_of_an_asynchronous_run_drain_one_after_another_and_never_at_once(tmp_path):
    chosen = engine.settings(tmp_path, "async", rollout=0.5, train=0.5, steps=6)
    chosen["rollout"] |= {"replicas": 2, "max_inflight": 16}
    chosen["weights"] = {"apply": "drain"}
    summary = Flow(load([], base=chosen).pipeline, dataset=engine.dataset()).start().wait(300)
    assert summary["complete"]
    (segment,) = read(summary.folder)
    drains = sorted(
        (span.started, span.ended, span.replica)
        for span in segment.spans
        if span.name == "apply" and span.facts["version"] > 0
    )
    assert {replica for _, _, replica in drains} == {"rollout-0", "rollout-1"}
    assert len(drains) >= 4
    assert all(ended <= begun for (_, ended, _), (begun, _, _) in pairwise(drains))
