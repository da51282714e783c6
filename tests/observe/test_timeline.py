import json

import msgspec
import pytest

from asyncflow.errors import DataError
from asyncflow.observe.timeline import read, times, write
from asyncflow.observe.trace import TRACE, Batch, Begun, Span, Step

MS = 1000


def batch(replica: str, lane: int, *moments: int, waits=(), version=None, rows=4) -> Batch:
    started, leased, ended = (MS * moment for moment in moments)
    waits = [(MS * began, MS * end) for began, end in waits]
    blocked = sum(end - began for began, end in waits)
    stage = replica.rpartition("-")[0]
    return Batch(replica, "train", stage, lane, rows, started, leased, ended, blocked, waits, version)


FIRST = [
    Begun(1000.0),
    batch("rollout-0", 0, 0, 10, 30, waits=((15, 20),)),
    batch("rollout-0", 1, 0, 12, 32),
    batch("train-0", 0, 0, 30, 50, waits=((30, 31), (45, 50)), version=3, rows=8),
    Span("train-0", "weights: publish", "publish", 45 * MS, 60 * MS, {"version": 3}),
    Step(51 * MS, "step", 1, 3, 8, 0.5),
]
AGAIN = [Begun(5000.0), batch("rollout-0", 0, 0, 10, 20), Step(25 * MS, "step", 2, 4, 4, 1.0)]


@pytest.fixture
def folder(tmp_path):
    """A run that was gone on with, and is cut off in the middle of a line."""
    lines = b"".join(msgspec.json.encode(line) + b"\n" for line in (*FIRST, *AGAIN))
    (tmp_path / TRACE).write_bytes(lines + b'{"type":"span","repl')
    return tmp_path


def events(folder):
    write(read(folder), folder / "trace.json")
    return json.loads((folder / "trace.json").read_text())["traceEvents"]


def slices(folder, replica, lane):
    found = events(folder)
    (pid,) = [one["pid"] for one in found if one["name"] == "process_name" and one["args"]["name"] == replica]
    threads = [one for one in found if one["name"] == "thread_name" and one["pid"] == pid]
    (tid,) = [one["tid"] for one in threads if one["args"]["name"] == lane]
    here = [one for one in found if one["ph"] == "X" and (one["pid"], one["tid"]) == (pid, tid)]
    return [(one["name"], one["ts"] // MS, one["dur"] // MS, one["args"]) for one in here]


def test_each_lane_of_a_replica_is_a_thread_of_its_process(folder):
    work = {"table": "train", "stage": "rollout", "rows": 4}
    assert slices(folder, "rollout-0", "rollout of train, lane 1") == [
        ("wait for rows", 0, 12, {}), ("rollout", 12, 20, work),
    ]  # fmt: skip
    assert slices(folder, "rollout-0", "rollout of train")[:4] == [
        ("wait for rows", 0, 10, {}), ("rollout", 10, 5, work),
        ("wait for the queue", 15, 5, {}), ("rollout", 20, 10, {"continued": True}),
    ]  # fmt: skip


def test_a_batch_that_waits_at_once_has_its_rows_and_step_too(folder):
    work = {"table": "train", "stage": "train", "rows": 8, "version": 3, "step": 1}
    assert slices(folder, "train-0", "train of train") == [
        ("wait for rows", 0, 30, {}), ("train", 30, 0, work), ("wait for the queue", 30, 1, {}),
        ("train", 31, 14, {"continued": True}), ("wait for the queue", 45, 5, {}),
    ]  # fmt: skip
    assert slices(folder, "train-0", "weights: publish") == [("publish", 45, 15, {"version": 3})]


def test_a_run_that_goes_on_lies_behind_what_was_before(folder):
    last = slices(folder, "rollout-0", "rollout of train")[-2:]
    assert [(name, began, length) for name, began, length, _ in last] == [
        ("wait for rows", 1060, 10), ("rollout", 1070, 10),
    ]  # fmt: skip
    (again,) = [one for one in events(folder) if one["ph"] == "i"]
    assert again["ts"] == 1060 * MS


def test_counters_tell_what_is_finished_and_not_trained_and_how_old_it_was(folder):
    counters = [one for one in events(folder) if one["ph"] == "C"]
    rows = [one["args"]["rows"] for one in counters if one["name"] == "responses not trained"]
    assert rows == [4, 8, 0, 4, 0]
    assert [one["args"]["versions"] for one in counters if one["name"] == "mean staleness"] == [0.5, 1.0]


def test_times_count_over_both_parts(folder):
    found = times(read(folder))
    assert found.rows("rollout") == 12
    assert found.per_second() == {
        "rollout": {"rollout-0": {"busy": 640, "idle": 360, "blocked": 0}},
        "train": {"train-0": {"busy": 350, "idle": 500, "blocked": 150}},
    }


def test_what_has_no_trace_is_refused_with_what_was_expected(tmp_path):
    with pytest.raises(DataError, match=r"holds no trace\.jsonl: expected the folder of a run"):
        read(tmp_path)
    (tmp_path / TRACE).write_text('{"type":"begun","wa')
    with pytest.raises(DataError, match="no line of a trace"):
        read(tmp_path)
