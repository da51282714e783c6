"""What holds of the trace of every run."""

import json
from collections import defaultdict
from itertools import pairwise
from pathlib import Path

from asyncflow.cli.trace import trace
from asyncflow.observe.timeline import read, times


def check_trace(folder: Path, parts: int = 1) -> int:
    """Check slices, and the time of each replica; return how many rows the trainer's batches had."""
    assert trace(folder, None) == 0
    events = json.loads((folder / "trace.json").read_text())["traceEvents"]
    lanes = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            assert event["dur"] >= 0
            lanes[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    for slices in lanes.values():
        slices.sort()
        assert all(ended <= begins for (_, ended), (begins, _) in pairwise(slices))
    check_names({event["name"] for event in events})
    segments = read(folder)
    assert len(segments) == parts
    for replicas in times(segments).per_second().values():
        assert all(sum(own.values()) == 1000 and min(own.values()) >= 0 for own in replicas.values())
    return sum(event["args"].get("rows", 0) for event in events if event["ph"] == "X" and event["name"] == "train")


def check_names(names: set[str]) -> None:
    batches = {"rollout", "reward", "advantage", "train", "wait for rows", "wait for the queue"}
    weights = {"copy", "publish", "stage", "apply", "write checkpoint"}
    assert names >= {*batches, *weights, "training", "saving", "responses not trained", "mean staleness"}
