"""How fast do rows go through the queue? Ours against the public one, a warm copy and a bare socket, in one run.

Redis Streams and the object store of Ray are measured beside them where they are installed.

python -m benchmarks.queue [--peer /path/to/venv/python] [--rounds N] [--quick]

Every round measures everybody in turn, so that a busy machine troubles all alike; a figure is the median of the
rounds' medians, with the least and the greatest of them. Ratios say more than milliseconds.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from rich.console import Console
from rich.table import Table

from benchmarks import report
from benchmarks.others import RayStore, Redis
from benchmarks.rows import Case, nbytes
from benchmarks.subjects import Copy, Embedded, Peer, Served, Subject, Wire

QUESTION = "How fast do rows go through the queue?"
Figures: TypeAlias = dict[str, dict[str, list[float]]]
"""By case, then by subject and operation: one figure a round."""


@dataclass(frozen=True)
class Size:
    """How much is measured."""

    cases: tuple[tuple[Case, int], ...]
    """Batches, and how often each is put and got in a round."""
    streamed: int
    delivered: int
    placed: tuple[int, ...]
    held: tuple[int, ...]
    held_by_peer: tuple[int, ...]
    batch: int = 256


FULL = Size(
    (
        (Case("a: 256 rows of tokens", "tokens", 256), 12),
        (Case("b: 8 rows of tokens", "tokens", 8), 40),
        (Case("c: 64 rows of 1 MiB", "blobs", 64), 4),
    ),
    streamed=400,
    delivered=100,
    placed=(1, 64),
    held=(1_000, 1_000_000),
    held_by_peer=(1_000, 8_000),
)
QUICK = Size(
    ((Case("a: 16 rows of tokens", "tokens", 16), 2), (Case("c: 2 rows of 1 MiB", "blobs", 2), 2)),
    streamed=4,
    delivered=3,
    placed=(1, 2),
    held=(300, 3_000),
    held_by_peer=(300,),
    batch=32,
)


def measure(subjects: Sequence[Subject], size: Size, rounds: int, note: Callable[[str], None]) -> Figures:
    """Measure everybody in each round."""
    figures: Figures = {}
    for number in range(rounds):
        for subject in subjects:
            note(f"{time.strftime('%H:%M:%S')} round {number + 1} of {rounds}: {subject.name}")
            for case, key, figure in _once(subject, size, first=number == 0):
                figures.setdefault(case, {}).setdefault(f"{subject.name} {key}", []).append(figure)
    return dict(sorted(figures.items()))


def _once(subject: Subject, size: Size, first: bool) -> list[tuple[str, str, float]]:
    """One round of one subject: case, operation, figure. What grows with what is held is measured once only."""
    found = []
    for case, repeat in size.cases:
        for key, seconds in subject.batches(case, repeat).items():
            found.append((f"{case.name}, ms", key, 1e3 * statistics.median(seconds)))
    if rate := subject.stream(8, size.streamed):
        found.append(("b: batches of 8 from process to process, rows/s", "stream", rate))
    if seconds := subject.latency(size.delivered):
        found.append(("e: one row through an idle queue, µs", "delivered", 1e6 * statistics.median(seconds)))
    for rows in size.placed:
        if seconds := subject.placed(rows, 8):
            cost = 1e3 * statistics.median(seconds)
            found.append(("f: rows of 1 MiB put where they were written, ms", f"put of {rows}", cost))
    if first:
        for rows in size.held_by_peer if isinstance(subject, Peer) else size.held:
            if seconds := subject.held(rows, size.batch, 10):
                cost = 1e6 * statistics.median(seconds) / size.batch
                found.append(("d: a row through 8 tasks, µs", f"with {rows} held", cost))
    return found


def table(figures: Figures) -> Table:
    """Show the figures, with the spread over the rounds."""
    shown = Table("case", "who", "median", "least", "greatest", title=QUESTION)
    for case, rows in figures.items():
        for who, values in rows.items():
            spread = report.spread(values)
            shown.add_row(case, who, *(f"{spread[key]:,.4g}" for key in ("median", "min", "max")))
        shown.add_section()
    return shown


def draw(figures: Figures, path: Path) -> None:
    """Draw a bar for each figure, on logarithmic scales."""
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import pyplot

    heights = [1 + 0.3 * len(rows) for rows in figures.values()]
    figure, axes = pyplot.subplots(
        len(figures), 1, figsize=(9, sum(heights)), squeeze=False, height_ratios=heights, layout="constrained"
    )
    for axis, (case, rows) in zip(axes[:, 0], figures.items(), strict=True):
        medians = [statistics.median(values) for values in rows.values()]
        spans = [[m - min(v) for m, v in zip(medians, rows.values(), strict=True)],
                 [max(v) - m for m, v in zip(medians, rows.values(), strict=True)]]  # fmt: skip
        colours = ["tab:orange" if who.startswith(Peer.name) else "tab:blue" for who in rows]
        axis.barh(list(rows), medians, xerr=spans, color=colours)
        axis.set(title=case, xscale="log")
        axis.invert_yaxis()
    figure.savefig(path, dpi=100)
    pyplot.close(figure)


def result(figures: Figures, size: Size, rounds: int, peer: Mapping[str, str]) -> dict[str, object]:
    """What is written: every figure of every round, and their spread."""
    return {
        "rounds": rounds,
        "peer": dict(peer),
        "bytes": {case.name: nbytes(case.rows()) for case, _ in size.cases},
        "figures": {case: {who: {**report.spread(v), "rounds": v} for who, v in rows.items()}
                    for case, rows in figures.items()},
    }  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> Path:
    """Measure, print and write results/queue.json and results/queue.png, or only print with --quick."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.queue", description=QUESTION)
    parser.add_argument("--peer", help="interpreter of an environment that has transferqueue")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="tiny sizes, to see that everything runs")
    parser.add_argument("--output", type=Path, default=report.RESULTS, help="folder of the results")
    options = parser.parse_args(arguments)
    size = QUICK if options.quick else FULL
    subjects: list[Subject] = [Copy(), Wire(), Embedded(), Served()]
    if Redis.installed():
        subjects.append(Redis())
    peer = Peer(options.peer) if options.peer else None
    if peer:
        subjects += [peer, RayStore(peer)]
    try:
        figures = measure(subjects, size, options.rounds, _note)
    finally:
        if peer:
            peer.close()
    Console(width=110).print(table(figures))
    found = result(figures, size, options.rounds, peer.versions if peer else {})
    path = report.write("queue", QUESTION, found, options.output)
    draw(figures, path.with_suffix(".png"))
    return path


def _note(text: str) -> None:
    sys.stderr.write(text + "\n")


if __name__ == "__main__":
    main()
