"""A run from its file to its folder, in both modes."""

import json
import multiprocessing
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import yaml

from asyncflow import Flow

pytestmark = pytest.mark.timeout(1200)  # processes start slowly where cores are shared


def timeless(folder: Path) -> list[dict[str, object]]:
    """The records of a run without what the clock decides."""
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for record in records:
        del record["time"]
    return records


def test_the_same_seed_gives_the_same_metrics_in_both_modes_and_a_complete_folder(pipeline):
    path = pipeline()
    summary = Flow.from_yaml(path).start().wait(300)
    other = Flow.from_yaml(path, "mode=separated").start().wait(300)
    assert timeless(summary.folder) == timeless(other.folder)
    assert other.folder.name == "run-2"
    check_records(timeless(summary.folder))
    check_summary(summary.folder)
    check_samples(summary.folder / "samples")
    check_model(summary.folder / "checkpoint")
    assert multiprocessing.active_children() == []
    assert sorted(entry.name for entry in summary.folder.iterdir()) == [
        ".lock",
        "checkpoint",
        "config.yaml",
        "metrics.jsonl",
        "samples",
        "summary.json",
        "trace.jsonl",
    ]


def check_records(records: list[dict[str, object]]) -> None:
    kinds = [record["kind"] for record in records]
    assert kinds == ["eval", "warmup", "warmup", "eval", "step", "step", "step", "eval"]
    steps = [record for record in records if record["kind"] == "step"]
    assert [(step["step"], step["version"], step["rows"]) for step in steps] == [(1, 3, 16), (2, 4, 16), (3, 5, 16)]
    for step in steps:
        assert step["ratio_mean"] == pytest.approx(1, abs=1e-4)
        assert step["logprob_gap_max"] < 1e-4
        assert step["staleness_max"] == 0
        assert step["staleness_histogram"] == [16]
        assert step["generated_response_tokens_mean"] == step["response_tokens_mean"]
        assert step["dropped"] == {}


def check_summary(folder: Path) -> None:
    values = json.loads((folder / "summary.json").read_text())
    assert values["complete"]
    for moment in ("before", "after_warmup", "after"):
        assert 0 <= values[f"eval/accuracy_{moment}"] <= 1
    assert values["ledger"] == {"admitted": 48, "done": 48, "dropped": {}, "live": 0}
    for stage in ("rollout", "reward", "advantage", "train"):
        assert sum(values[f"stage/{stage}/{part}"] for part in ("busy", "idle", "blocked")) == pytest.approx(
            1, abs=1e-3
        )
    for replicas in values["replicas"].values():
        assert all(sum(own.values()) == 1000 for own in replicas.values())
    assert values["bottleneck"] in values["replicas"]
    assert values["rows_per_s"] > 0


def check_samples(folder: Path) -> None:
    tables = [pq.read_table(path) for path in sorted(folder.iterdir())]
    assert [table.num_rows for table in tables] == [16, 16, 16]
    assert set(tables[2]["version"].to_pylist()) == {4}
    for text, word in zip(tables[0]["prompt_text"].to_pylist(), tables[0]["answer_text"].to_pylist(), strict=True):
        assert text == f"{word}:"


def check_model(folder: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert model.config.vocab_size == len(tokenizer)
    assert tokenizer.decode(tokenizer("cat:")["input_ids"]) == "cat:"


def test_the_resolved_config_of_a_run_runs_again(pipeline):
    flow = Flow.from_yaml(pipeline(warmup=None, eval={"rows": 0}, train={"steps": 1}))
    flow.start().wait(300)
    resolved = flow.folder / "config.yaml"
    assert yaml.safe_load(resolved.read_text())["train"]["steps"] == 1
    assert Flow.from_yaml(resolved).config == flow.config
