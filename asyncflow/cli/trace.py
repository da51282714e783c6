"""`asyncflow trace`: write what a run did when, for Perfetto, and show where its time went."""

import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

from asyncflow.cli.validate import USAGE
from asyncflow.errors import AsyncflowError
from asyncflow.observe.timeline import Segment, read, times, write
from asyncflow.observe.times import STATES, Times

FAILED = 1


def trace(folder: Path, output: Path | None) -> int:
    """Write the Chrome trace of a run's folder, print where the time went, and return the exit code."""
    try:
        segments = read(folder)
    except AsyncflowError as error:
        sys.stderr.write(f"{error}\n")
        return USAGE
    path = output if output is not None else folder / "trace.json"
    try:
        write(segments, path)
    except OSError as error:
        sys.stderr.write(f"{path} cannot be written: {error.strerror}\n")
        return FAILED
    terminal = sys.stdout.isatty()
    console = Console(width=None if terminal else 120, soft_wrap=not terminal, highlight=False)
    console.print(_size(folder, segments))
    spent = times(segments)
    console.print(_table(spent) if spent.stages else "no batch of the train table is finished yet")
    if spent.bottleneck is not None:
        replica, own = spent.worst(spent.bottleneck)
        working = f"{replica} works {own.per_second()['busy']} ms of each second"
        console.print(f"bottleneck: {spent.bottleneck} ({working})")
    console.print(f"{path} opens in https://ui.perfetto.dev")
    return 0


def _size(folder: Path, segments: list[Segment]) -> str:
    seconds = sum(segment.length for segment in segments) / 1e6
    batches = sum(len(segment.batches) for segment in segments)
    steps = sum(step.kind == "step" for segment in segments for step in segment.steps)
    again = f", in {len(segments)} parts" if len(segments) > 1 else ""
    return f"{folder}: {seconds:,.1f} s{again}, {batches:,} batches, {steps:,} steps"


def _table(spent: Times) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("ms of each second")
    table.add_column("replica")
    for name in ("works", "waits for rows", "waits for the queue", "rows"):
        table.add_column(name, justify="right")
    for stage, replicas in spent.stages.items():
        worst, _ = spent.worst(stage)
        for name in sorted(replicas, key=lambda name: (name != worst, name)):
            own = replicas[name]
            numbers = own.per_second()
            shown = (*(str(numbers[state]) for state in STATES), f"{own.rows:,}")
            table.add_row(stage if name == worst else "", name, *shown)
    return table
