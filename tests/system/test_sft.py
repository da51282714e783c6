"""Supervised training as the main phase: what it learns, and that it goes on to the same end."""

import json

import pytest

from asyncflow import Flow
from asyncflow.checkpoint import progress
from tests.system.test_resume import until
from tests.system.test_run import timeless

pytestmark = pytest.mark.timeout(1200)  # processes start slowly where cores are shared

SFT = {
    "warmup": None,
    "train": {
        "algorithm": "sft", "rows_per_step": 12, "steps": 12, "lr": 1e-2, "schedule": "linear",
        "group_size": None, "prompts_per_step": None,
    },
    "eval": {"every": 5},
    "output": {"checkpoint_every": 4},
}  # fmt: skip


def records(folder, kind):
    return [record for record in timeless(folder) if record["kind"] == kind]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Where an uninterrupted run is, made once."""
    return tmp_path_factory.mktemp("uninterrupted") / "run"


def uninterrupted(path, folder):
    if not folder.exists():
        Flow.from_yaml(path, f"output.folder={folder}").start().wait(600)
    return folder


def test_given_answers_become_likelier_and_evaluations_stand_where_they_are_due(pipeline, whole):
    folder = uninterrupted(pipeline(**SFT), whole)
    steps = records(folder, "step")
    assert [(step["step"], step["version"]) for step in steps] == [(number, number) for number in range(1, 13)]
    assert [step["rows"] for step in steps] == [12.0] * 12
    assert steps[0]["tokens"] == 12 * (4 + 4)  # three letters and a colon, three letters and the end
    assert steps[0]["nll"] == pytest.approx(steps[0]["loss"])
    assert steps[-1]["nll"] < 0.8 * steps[0]["nll"]
    assert [round(step["lr"], 4) for step in steps[:3]] == [0.01, 0.0092, 0.0083]
    assert not {"reward_mean", "staleness_mean", "rows_dropped"} & steps[0].keys()
    moments = [(record["moment"], record["version"]) for record in records(folder, "eval")]
    assert moments == [("before", 0), ("step_5", 5), ("step_10", 10), ("after", 12)]
    values = json.loads((folder / "summary.json").read_text())
    assert (values["nll/first"], values["nll/last"]) == (steps[0]["nll"], steps[-1]["nll"])
    assert (values["steps"], values["rows"], values["reward/first"]) == (12, 144, None)
    assert values["ledger"] == {"admitted": 144, "done": 144, "dropped": {}, "live": 0}
    assert sorted(each.name for each in (folder / "checkpoints").iterdir()) == ["step-000004", "step-000008"]
    assert progress(folder / "checkpoints" / "step-000008")["step"] == 8
    assert progress(folder / "checkpoint")["step"] == 12


@pytest.mark.parametrize("moment", [3, 8])
def test_a_run_that_is_stopped_goes_on_to_the_same_end(pipeline, whole, moment):
    path = pipeline(**SFT)
    flow = Flow.from_yaml(path).start()
    until(lambda: len(flow.metrics.of("step")) >= moment or flow.phase == "ended")
    flow.stop()
    assert not flow.wait(300)["complete"]
    assert Flow.resume(flow.folder).start().wait(300)["complete"]
    assert timeless(flow.folder) == timeless(uninterrupted(path, whole))


def test_without_evaluation_there_is_no_engine_and_ranks_share_each_step(pipeline):
    changes = {**SFT, "eval": {"rows": 0}, "train": {**SFT["train"], "steps": 3}}
    alone = Flow.from_yaml(pipeline(**changes)).start().wait(600)
    assert alone["replicas"].keys() == {"train"}
    both = Flow.from_yaml(pipeline(**changes), "train.data_parallel=2", "train.packing=true").start().wait(600)
    assert both["complete"]
    for one, other in zip(records(alone.folder, "step"), records(both.folder, "step"), strict=True):
        numbers = [{name: value for name, value in each.items() if name != "kind"} for each in (one, other)]
        assert numbers[1] == pytest.approx(numbers[0], rel=1e-3)


def test_answers_are_drawn_from_templates_and_devices_may_be_shared(pipeline):
    train = {**SFT["train"], "steps": 2, "answers": ["{word}{word}"]}
    summary = Flow.from_yaml(pipeline(**{**SFT, "train": train, "mode": "colocated"})).start().wait(600)
    assert [step["tokens"] for step in records(summary.folder, "step")] == [12 * (4 + 7)] * 2
    assert [record["moment"] for record in records(summary.folder, "eval")] == ["before", "after"]
