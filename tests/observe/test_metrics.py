import json

import pytest

from asyncflow.execute.messages import Worked
from asyncflow.observe.metrics import Metrics
from asyncflow.observe.progress import Lines, number, sparkline
from asyncflow.observe.summary import summarise
from asyncflow.storage.status import Counts


def worked(stage: str, started: float, idle: float, busy: float, replica: int = 0) -> Worked:
    return Worked("train", stage, f"{stage}-{replica}", 8, busy, idle, 0.0, started=started)


def step(count: int, **more: float) -> dict[str, float]:
    fixed = {"rows": 8, "tokens": 40, "reward_mean": 0.5, "staleness_min": 0, "staleness_mean": 0, "staleness_max": 0}
    return {"step": count, "version": count + 10, **fixed, **more}


def test_each_record_is_a_line_and_what_is_not_a_countis_null(tmp_path):
    metrics = Metrics(tmp_path / "metrics.jsonl")
    metrics.log("step", {"step": 1, "loss": float("nan"), "reward": 0.5})
    metrics.close()
    (line,) = (tmp_path / "metrics.jsonl").read_text().splitlines()
    record = json.loads(line)
    assert record["loss"] is None
    assert record["reward"] == 0.5
    assert "elapsed" in record["time"]


def test_a_resumed_run_goes_on_with_the_records_up_to_its_checkpoint(tmp_path):
    first = Metrics(tmp_path / "metrics.jsonl")
    for count in (1, 2, 3):
        first.log("step", step(count))
    first.close()
    second = Metrics(tmp_path / "metrics.jsonl")
    second.restore(version=12)
    second.log("step", step(3, reward_mean=0.9))
    second.close()
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [(line["step"], line["reward_mean"]) for line in lines] == [(1, 0.5), (2, 0.5), (3, 0.9)]
    assert [record["step"] for record in second.records] == [1, 2, 3]


@pytest.mark.parametrize("strange", [b'{"ki', b"[1]", b'{"kind": "step"}', b'{"version": 1}', b"\xff\xfe", b""])
def test_a_line_that_is_no_record_ends_what_is_gone_on_with(tmp_path, strange):
    first = Metrics(tmp_path / "metrics.jsonl")
    first.log("step", step(1))
    first.close()
    with first.path.open("ab") as file:
        file.write(strange + b"\n")
    second = Metrics(tmp_path / "metrics.jsonl")
    second.restore(version=12)
    assert [record["step"] for record in second.records] == [1]
    assert len(second.path.read_text().splitlines()) == 1


def test_a_step_says_how_the_time_since_the_last_one_was_spent_and_how_fast_it_was(tmp_path):
    metrics = Metrics(tmp_path / "metrics.jsonl")
    metrics.worked(worked("train", 0.0, 1.0, busy=1.0))
    metrics.log("step", step(1))
    metrics.worked(worked("train", 2.0, 3.0, busy=1.0))
    clock = metrics.log("step", step(2))["time"]
    metrics.close()
    assert clock["ms_per_s"] == {"train": {"train-0": {"busy": 250, "idle": 750, "blocked": 0}}}
    assert clock["train_busy"] == 1.0
    assert clock["tokens_per_s"] > 0
    assert clock["seconds"] >= 0


def test_the_summary_shows_a_stage_by_its_worst_replica(tmp_path):
    metrics = Metrics(tmp_path / "metrics.jsonl")
    metrics.worked(worked("rollout", 0.0, 1.0, busy=1.0, replica=0))
    metrics.worked(worked("rollout", 0.0, 2.0, busy=3.0, replica=1))
    metrics.worked(worked("train", 0.0, 4.0, busy=1.0))
    values = summarise(tmp_path, metrics, None, seconds=1.0, since=0, complete=True).values
    assert values["replicas"]["rollout"] == {
        "rollout-0": {"busy": 250, "idle": 750, "blocked": 0},
        "rollout-1": {"busy": 750, "idle": 250, "blocked": 0},
    }
    assert values["stage/rollout/busy"] == 0.75
    assert values["bottleneck"] == "rollout"


def test_the_summary_measures_speed_over_the_steps_of_this_session(tmp_path):
    metrics = Metrics(tmp_path / "metrics.jsonl")
    for count in (1, 2, 3):
        metrics.log("step", step(count))
    metrics.log("eval", {"moment": "before", "accuracy": 0.1, "reward_mean": 0.2, "version": 0})
    metrics.close()
    summary = summarise(tmp_path, metrics, Counts(24, 24, {}, 0), seconds=2.0, since=1, complete=True)
    assert summary["rows_per_s"] == 8.0
    assert summary["eval/accuracy_before"] == 0.1
    assert summary["ledger"] == {"admitted": 24, "done": 24, "dropped": {}, "live": 0}
    summary.write()
    assert json.loads((tmp_path / "summary.json").read_text())["complete"] is True


def test_the_summary_of_a_supervised_run_tells_what_it_learned_instead_of_rewards_and_ages(tmp_path):
    metrics = Metrics(tmp_path / "metrics.jsonl")
    for count, nll in ((1, 4.0), (2, 3.5)):
        metrics.log("step", {"step": count, "version": count, "nll": nll, "rows": 6.0, "tokens": 30.0})
    metrics.close()
    summary = summarise(tmp_path, metrics, None, seconds=2.0, since=0, complete=True)
    assert (summary["nll/first"], summary["nll/last"], summary["reward/last"]) == (4.0, 3.5, None)
    assert (summary["staleness/max"], summary["rows_per_s"], summary["tokens_per_s"]) == (None, 6.0, 30.0)


def test_a_run_that_never_stepped_has_a_summary_too(tmp_path):
    summary = summarise(tmp_path, Metrics(tmp_path / "m"), None, seconds=0.0, since=0, complete=False)
    assert summary["steps"] == 0
    assert summary["rows_per_s"] is None


def test_plain_lines_show_evaluations_and_some_steps():
    lines: list[str] = []
    show = Lines(400, lines.append)
    for count in range(1, 401):
        show({"kind": "step", **step(count), "time": {"elapsed": 1.0}})
    show({"kind": "eval", "moment": "after", "accuracy": 0.91, "rows": 200, "time": {}})
    assert len(lines) == 41
    assert lines[-1] == "eval after: accuracy 0.91 over 200 held-out prompts"
    several = {"prompts": 50, "pass@1": 0.9, "pass@4": 0.97, "maj@4": None}
    show({"kind": "eval", "moment": "after", "accuracy": 0.91, "rows": 200, **several, "time": {}})
    assert lines[-1] == "eval after: accuracy 0.91, pass@4 0.97, maj@4 – over 50 held-out prompts"


@pytest.mark.parametrize(("values", "line"), [([1.0], "▁"), ([0.0, 1.0], "▁█"), ([2.0, 2.0, 2.0], "▁▁▁")])
def test_sparklines(values, line):
    assert sparkline(values) == line


def test_numbers_are_short():
    assert [number(None), number(0.12345), number(12345.6)] == ["–", "0.123", "12,346"]


def test_what_is_recorded_beside_a_step_takes_nothing_from_its_time(tmp_path):
    metrics = Metrics(tmp_path / "metrics.jsonl")
    metrics._logged -= 100
    metrics.log("eval", {"moment": "step_1", "version": 1}, beside=True)
    assert metrics.log("step", {"step": 1, "version": 1})["time"]["seconds"] >= 100
    metrics._logged -= 100
    metrics.log("eval", {"moment": "after", "version": 1})
    assert metrics.log("step", {"step": 2, "version": 2})["time"]["seconds"] < 100
    metrics.close()
