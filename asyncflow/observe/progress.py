"""Progress in the terminal: a live view of stages and curves, or plain lines where there is no terminal."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from itertools import pairwise
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from asyncflow.flow import Flow
from asyncflow.observe.metrics import Record
from asyncflow.observe.times import STATES

_BARS = "▁▂▃▄▅▆▇█"
_WIDTH = 48


def watch(flow: Flow, console: Console, *, quiet: bool) -> AbstractContextManager[object]:
    """Show the run until the context ends: live on a terminal, else a line now and then, or nothing."""
    if quiet:
        return nullcontext()
    if console.is_terminal:
        return Live(get_renderable=lambda: view(flow), console=console, refresh_per_second=4, transient=True)
    flow.metrics.listeners.append(Lines(flow.config.train.steps, lambda line: console.print(line, highlight=False)))
    return nullcontext()


class Lines:
    """Prints a line for each evaluation, and for about forty of the steps."""

    def __init__(self, steps: int, write: Callable[[str], None]) -> None:
        self._steps, self._write = steps, write

    def __call__(self, record: Record) -> None:
        if record["kind"] == "eval":
            several = [key for key in record if "@" in key and not key.endswith("@1")]
            found = ", ".join(f"{key} {number(record[key])}" for key in ("accuracy", *several))
            prompts = record.get("prompts", record["rows"])
            self._write(f"eval {record['moment']}: {found} over {prompts} held-out prompts")
            return
        every = max(1, self._steps // 40)
        if record["step"] % every and record["step"] != self._steps:
            return
        what = "warm-up step" if record["kind"] == "warmup" else "step"
        of = f"/{self._steps}" if record["kind"] == "step" else ""
        shown = [
            f"{key.removesuffix('_mean')} {number(record[key])}" for key in _SHOWN[record["kind"]] if key in record
        ]
        self._write(f"{what} {record['step']}{of}: {', '.join(shown)} [{record['time']['elapsed']:.0f} s]")


_SHOWN = {
    "step": ("reward_mean", "teacher_kl", "nll", "loss", "response_tokens_mean", "grad_norm", "staleness_max"),
    "warmup": ("loss", "grad_norm"),
}


_CURVES = (
    ("reward_mean", "reward"),
    ("response_tokens_mean", "length"),
    ("loss", "loss"),
    ("tokens_per_s", "tokens/s"),
)


def view(flow: Flow) -> RenderableType:
    """Draw the state of a run."""
    steps = flow.metrics.of("step")
    title = Text.assemble(("asyncflow ", "bold"), flow.phase, (f"   {flow.folder}", "dim"))
    return Panel(Group(*_bars(flow, steps), _stages(flow), *_curves(flow, steps)), title=title, title_align="left")


def _bars(flow: Flow, steps: list[Record]) -> list[RenderableType]:
    warmups = len(flow.metrics.of("warmup"))
    grid = Table.grid(padding=(0, 1))
    if flow.config.warmup is not None:
        grid.add_row(
            "warm-up",
            ProgressBar(flow.config.warmup.steps, warmups, width=_WIDTH),
            f"{warmups}/{flow.config.warmup.steps}",
        )
    done = steps[-1]["step"] if steps else 0
    grid.add_row("steps", ProgressBar(flow.config.train.steps, done, width=_WIDTH), f"{done}/{flow.config.train.steps}")
    return [grid]


def _stages(flow: Flow) -> RenderableType:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for column in ("stage", "rows", "busy", "waits for rows", "waits for the queue"):
        table.add_column(column, justify="left" if column == "stage" else "right")
    times = flow.metrics.times
    for stage in flow.plan.tables["train"].stages:
        if stage.name in times.stages:
            replica, spent = times.worst(stage.name)
            shares = spent.shares()
            name = stage.name if stage.replicas == 1 else f"{stage.name} ({replica})"
            table.add_row(name, f"{times.rows(stage.name):,}", *(f"{shares[state]:.0%}" for state in STATES))
    return table


def _curves(flow: Flow, steps: list[Record]) -> list[RenderableType]:
    lines: list[RenderableType] = []
    for key, name in _CURVES:
        values = [value for step in steps if (value := {**step["time"], **step}.get(key)) is not None]
        if values:
            lines.append(Text(f"{name:>9} {sparkline(values)} {number(values[-1])}"))
    for record in flow.metrics.of("eval"):
        lines.append(Text(f"     eval {record['moment']}: accuracy {number(record['accuracy'])}", style="green"))
    return lines


def sparkline(values: list[float], width: int = _WIDTH) -> str:
    """Draw numbers as a line of small bars, the oldest on the left; each bar is the mean of its share of them."""
    count = min(width, len(values))
    edges = [round(index * len(values) / count) for index in range(count + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    low, high = min(means), max(means)
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BARS[round((mean - low) * scale)] for mean in means)


def number(value: Any) -> str:
    """Show a number in few characters; a dash where there is none."""
    return "–" if value is None else f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"


def closing(flow: Flow, seconds: float) -> RenderableType:
    """Draw what a run learned, how fast, and who worked."""
    values = flow.wait().values
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim")
    grid.add_column()
    evaluations = [key for key in values if key.startswith("eval/accuracy_")]
    if evaluations:
        shown = " → ".join(
            f"{number(values[key])} ({key.removeprefix('eval/accuracy_').replace('_', ' ')})" for key in evaluations
        )
        grid.add_row("accuracy", f"{shown}, on {flow.config.eval.rows} held-out prompts")
    learned = "nll" if "nll/first" in values else "reward"
    first, last = number(values[f"{learned}/first"]), number(values[f"{learned}/last"])
    grid.add_row(learned, f"{first} → {last} in {values['steps']} steps")
    grid.add_row(
        "speed",
        f"{number(values['rows_per_s'])} rows/s, {number(values['tokens_per_s'])} tokens/s; {seconds:.0f} s in all",
    )
    for stage in flow.plan.tables["train"].stages:
        if f"stage/{stage.name}/busy" in values:
            busy, idle, blocked = (values[f"stage/{stage.name}/{state}"] for state in STATES)
            most = " (the most of all)" if stage.name == values["bottleneck"] else ""
            line = f"worked {busy:.0%}{most}, waited for rows {idle:.0%}, for the queue {blocked:.0%}"
            grid.add_row(stage.name, line if stage.replicas == 1 else f"{line}, its busiest replica")
    if values["staleness/max"] is not None:
        oldest, mean = number(values["staleness/max"]), number(values["staleness/mean"])
        grid.add_row("staleness", f"mean {mean}, oldest trained token {oldest} versions")
    ledger = {"admitted": 0, "done": 0, "dropped": {}, "live": 0, **(values["ledger"] or {})}
    dropped = ", ".join(f"{rows} {reason}" for reason, rows in ledger["dropped"].items()) or "0"
    rows = f"{ledger['admitted']} admitted = {ledger['done']} trained + {dropped} dropped + {ledger['live']} live"
    grid.add_row("rows", rows)
    if values["restarts"]:
        grid.add_row("restarts", ", ".join(f"{name} {count}" for name, count in values["restarts"].items()))
    grid.add_row("folder", str(flow.folder))
    return grid
