import threading
import time

import msgspec

from asyncflow.execute.messages import Ready, Traced, Worked
from asyncflow.observe.timeline import read
from asyncflow.observe.trace import TRACE, Span, Trace


def worked(rows: int = 8) -> Worked:
    now = time.monotonic()
    waits = ((now + 0.2, now + 0.25),)
    return Worked("train", "train", "trainer-0", rows, 0.25, 0.1, 0.05, started=now, version=3, waits=waits)


def record(**more: object) -> dict[str, object]:
    return {"kind": "step", "step": 1, "version": 3, "rows": 16.0, "rows_dropped": 4, "staleness_mean": 0.5, **more}


def test_batches_spans_phases_and_steps_are_written_and_other_events_are_not(tmp_path):
    with Trace(tmp_path / TRACE) as trace:
        trace.take("trainer-0", worked())
        trace.take("trainer-0", Traced("weights: copy", "copy", time.monotonic(), 0.5, {"version": 3}))
        trace.take("trainer-0", Ready())
        trace.enter("training")
        trace.enter("training")
        trace.record(record())
        trace.record({"kind": "eval", "moment": "after"})
    (segment,) = read(tmp_path)
    (batch,) = segment.batches
    assert 0 <= batch.started < batch.leased < batch.ended
    assert abs(batch.ended - batch.started - 400_000) <= 1
    assert (batch.rows, batch.version, len(batch.waits)) == (8, 3, 1)
    assert [(span.replica, span.name) for span in segment.spans] == [
        ("trainer-0", "copy"), ("flow", "starting"), ("flow", "training"),
    ]  # fmt: skip
    assert [(step.step, step.version, step.rows, step.staleness) for step in segment.steps] == [(1, 3, 20, 0.5)]


def test_a_step_leaves_everything_before_it_in_the_file(tmp_path):
    trace = Trace(tmp_path / TRACE)
    trace.take("trainer-0", worked())
    trace.record(record())
    (segment,) = read(tmp_path)
    assert (len(segment.batches), len(segment.steps)) == (1, 1)
    trace.close()
    trace.close()


def test_a_run_that_goes_on_adds_a_segment_behind_a_line_that_was_cut_off(tmp_path):
    for rows in (8, 9):
        with Trace(tmp_path / TRACE) as trace:
            trace.take("trainer-0", worked(rows))
        with (tmp_path / TRACE).open("ab") as file:
            file.write(b'{"type":"batch","replica":"tr')
    assert [[batch.rows for batch in segment.batches] for segment in read(tmp_path)] == [[8], [9]]


def test_without_a_path_the_phase_is_known_and_nothing_written(tmp_path):
    trace = Trace()
    trace.enter("training")
    trace.take("trainer-0", worked())
    trace.record(record())
    trace.close()
    assert trace.phase == "training"
    assert list(tmp_path.iterdir()) == []


def test_threads_do_not_mix_their_lines(tmp_path):
    with Trace(tmp_path / TRACE) as trace:
        threads = [threading.Thread(target=lambda: [trace.take("a", worked()) for _ in range(500)]) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    lines = (tmp_path / TRACE).read_bytes().splitlines()
    assert len([msgspec.json.decode(line) for line in lines]) == 2 + 2000
    assert isinstance(read(tmp_path)[0].spans[0], Span)
