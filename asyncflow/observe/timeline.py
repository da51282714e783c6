"""The trace of a run, read again: as a Chrome trace that Perfetto opens, and as what each replica did with its time.

A run that was gone on with has several segments, each with a clock of its own: they are laid one after another, with
a second between them. A line that was cut off is skipped, since a run may be killed at any time, and may still go on.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from asyncflow.errors import DataError
from asyncflow.execute.messages import Worked
from asyncflow.observe.times import Stopwatch, Times
from asyncflow.observe.trace import FLOW, TRACE, Batch, Begun, Line, Span, Step

Event = dict[str, Any]
"""One event of a Chrome trace."""
_DECODER: msgspec.json.Decoder[Line] = msgspec.json.Decoder(Line)
_GAP = 1_000_000
_TABLES = {"step": "train", "warmup": "warmup"}


@dataclass(slots=True)
class Segment:
    """What one process wrote."""

    begun: Begun
    batches: list[Batch] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)

    def add(self, line: Batch | Span | Step) -> None:
        """Take a line in."""
        if isinstance(line, Batch):
            self.batches.append(line)
        elif isinstance(line, Span):
            self.spans.append(line)
        else:
            self.steps.append(line)

    @property
    def length(self) -> int:
        """Microseconds from its beginning to its last end."""
        ends = (*(batch.ended for batch in self.batches), *(span.ended for span in self.spans))
        return max((*ends, *(step.at for step in self.steps)), default=0)


def read(folder: Path) -> list[Segment]:
    """Return the segments of a run's trace; DataError where there is none."""
    path = folder / TRACE
    if not path.is_file():
        raise DataError(
            f"{folder} holds no {TRACE}: expected the folder of a run that has begun with output.trace: true"
        )
    segments: list[Segment] = []
    with path.open("rb") as file:
        for line in _whole(file):
            if isinstance(line, Begun):
                segments.append(Segment(line))
            elif segments:
                segments[-1].add(line)
    if not segments:
        raise DataError(f"{path} holds no line of a trace: expected one that a run has written")
    return segments


def _whole(lines: Iterable[bytes]) -> Iterator[Line]:
    for line in lines:
        try:
            yield _DECODER.decode(line)
        except msgspec.DecodeError:
            continue  # cut off


def times(segments: Iterable[Segment]) -> Times:
    """Return where the time went, counted as `summary.json` does."""
    found = Times()
    for segment in segments:
        stopwatch = Stopwatch()  # the clock of each begins anew
        for batch in segment.batches:
            stopwatch.add(_worked(batch))
        found = found.plus(stopwatch.times())
    return found


def _worked(batch: Batch) -> Worked:
    """Return the event that the line was made from."""
    busy, idle = max(0, batch.ended - batch.leased - batch.blocked), batch.leased - batch.started
    return Worked(
        batch.table,
        batch.stage,
        batch.replica,
        batch.rows,
        busy / 1e6,
        idle / 1e6,
        min(batch.blocked, batch.ended - batch.leased) / 1e6,
        started=batch.started / 1e6,
        waits=tuple((began / 1e6, ended / 1e6) for began, ended in batch.waits),
    )


def chrome(segments: Sequence[Segment]) -> Iterator[Event]:
    """Yield the events of a Chrome trace: a process for each replica, a thread for each of its lanes."""
    lanes = _lanes(segments)
    yield from _names(lanes)
    offset = 0
    for number, segment in enumerate(segments):
        if number:
            yield {"ph": "i", "s": "g", "name": "gone on with", **_place(lanes, FLOW, "phases"), "ts": offset}
        for event in (*_batches(segment, lanes), *_spans(segment, lanes), *_counters(segment)):
            yield {**event, "ts": event["ts"] + offset}
        offset += segment.length + _GAP


def write(segments: Sequence[Segment], path: Path) -> None:
    """Write a Chrome trace; it appears whole or not at all."""
    partial = path.with_name(f"{path.name}.partial")
    with partial.open("wb") as file:
        file.write(b'{"displayTimeUnit":"ms","traceEvents":[')
        for number, event in enumerate(chrome(segments)):
            file.write((b",\n" if number else b"\n") + msgspec.json.encode(event))
        file.write(b"\n]}\n")
    partial.replace(path)


Lanes = Mapping[str, Sequence[str]]
"""The lanes of each replica, in the order in which they are shown; the flow's is the first."""


def _lanes(segments: Sequence[Segment]) -> Lanes:
    found: dict[str, dict[str, None]] = {FLOW: {"phases": None}}
    for segment in segments:
        for batch in sorted(segment.batches, key=lambda batch: (batch.table != "train", batch.stage, batch.lane)):
            found.setdefault(batch.replica, {})[_lane(batch)] = None
        for span in sorted(segment.spans, key=lambda span: span.lane):
            found.setdefault(span.replica, {})[span.lane] = None
    order = [FLOW, *sorted(found.keys() - {FLOW})]
    return {replica: list(found[replica]) for replica in order}


def _lane(batch: Batch) -> str:
    return f"{batch.stage} of {batch.table}" + (f", lane {batch.lane}" if batch.lane else "")


def _place(lanes: Lanes, replica: str, lane: str) -> dict[str, int]:
    return {"pid": list(lanes).index(replica) + 1, "tid": lanes[replica].index(lane) + 1}


def _names(lanes: Lanes) -> Iterator[Event]:
    for pid, (replica, own) in enumerate(lanes.items(), start=1):
        yield {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": replica}}
        yield {"ph": "M", "name": "process_sort_index", "pid": pid, "args": {"sort_index": pid}}
        for tid, lane in enumerate(own, start=1):
            yield {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": lane}}
            yield {"ph": "M", "name": "thread_sort_index", "pid": pid, "tid": tid, "args": {"sort_index": tid}}


def _slice(name: str, kind: str, began: int, ended: int, facts: Mapping[str, object]) -> Event:
    return {"ph": "X", "name": name, "cat": kind, "ts": began, "dur": max(0, ended - began), "args": facts}


def _spans(segment: Segment, lanes: Lanes) -> Iterator[Event]:
    for span in segment.spans:
        place = _place(lanes, span.replica, span.lane)
        yield {**_slice(span.name, span.lane, span.started, span.ended, span.facts), **place}


def _batches(segment: Segment, lanes: Lanes) -> Iterator[Event]:
    steps = {(_TABLES[step.kind], step.version): step.step for step in segment.steps}
    for batch in segment.batches:
        facts: dict[str, object] = {"table": batch.table, "stage": batch.stage, "rows": batch.rows}
        if batch.version is not None:
            facts["version"] = batch.version
            if (batch.table, batch.version) in steps:
                facts["step"] = steps[batch.table, batch.version]
        place = _place(lanes, batch.replica, _lane(batch))
        yield from ({**event, **place} for event in _parts(batch, facts))


def _parts(batch: Batch, facts: Mapping[str, object]) -> Iterator[Event]:
    """Yield the slices of a batch; of work that waited for the queue, the pieces after the first have no rows."""
    if batch.leased > batch.started:
        yield _slice("wait for rows", "idle", batch.started, batch.leased, {})
    at, begun = batch.leased, False
    for began, ended in (*batch.waits, (batch.ended, batch.ended)):
        began, ended = max(at, began), min(max(at, ended), batch.ended)
        if began > at or not begun:
            yield _slice(batch.stage, "busy", at, began, facts if not begun else {"continued": True})
            begun = True
        if ended > began:
            yield _slice("wait for the queue", "blocked", began, ended, {})
        at = max(began, ended)


def _counters(segment: Segment) -> Iterator[Event]:
    """Yield how many responses are finished and not trained, and how old the trained ones were."""
    changes = [
        (batch.ended, batch.rows) for batch in segment.batches if (batch.table, batch.stage) == ("train", "rollout")
    ]
    steps = [step for step in segment.steps if step.kind == "step"]
    rows = 0
    for at, change in sorted([*changes, *((step.at, -step.rows) for step in steps)]):
        rows = max(0, rows + change)
        yield {"ph": "C", "name": "responses not trained", "pid": 1, "ts": at, "args": {"rows": rows}}
    for step in steps:
        yield {"ph": "C", "name": "mean staleness", "pid": 1, "ts": step.at, "args": {"versions": step.staleness}}
