"""`asyncflow run` and `asyncflow resume`: start a flow, show it, and end it cleanly on Ctrl-C."""

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console

from asyncflow.cli.validate import USAGE, split
from asyncflow.config.load import load
from asyncflow.errors import AsyncflowError, MissingDependency
from asyncflow.flow import Flow, is_complete, last_run
from asyncflow.observe import curves
from asyncflow.observe.progress import closing, watch

FAILED = 1
INTERRUPTED = 130


def run(arguments: Sequence[str], *, resume: bool = False, quiet: bool) -> int:
    """Run a pipeline, or go on with its last run, and return the exit code: 0 also if that run is complete."""
    files, overrides = split(arguments)
    if not resume:
        return _follow(lambda: Flow(load(files, overrides).pipeline), quiet=quiet)
    try:
        config = load(files, overrides).pipeline
    except AsyncflowError as error:
        sys.stderr.write(f"{error}\n")
        return USAGE
    last = last_run(Path(config.output.folder))
    if last is not None and is_complete(last):
        sys.stdout.write(f"the run in {last} is complete\n")
        return 0
    return _follow(lambda: Flow.go_on(config), quiet=quiet)


def resume(folder: Path, *, quiet: bool) -> int:
    """Go on with a run and return the exit code."""
    return _follow(lambda: Flow.resume(folder), quiet=quiet)


def _follow(make: Callable[[], Flow], *, quiet: bool) -> int:
    terminal = sys.stdout.isatty()
    console, started = Console(width=None if terminal else 120, soft_wrap=not terminal), time.monotonic()
    try:
        flow = make()
    except AsyncflowError as error:
        sys.stderr.write(f"{error}\n")
        return USAGE
    with _interrupts_stop(flow), watch(flow, console, quiet=quiet):
        flow.start()
        flow.join()
    try:
        summary = flow.wait()
    except (AsyncflowError, OSError) as error:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        return FAILED
    _draw(flow)
    console.print(closing(flow, time.monotonic() - started), highlight=False)
    if summary["complete"]:
        return 0
    console.print(f"interrupted; go on with: asyncflow resume {flow.folder}", highlight=False)
    return INTERRUPTED


def _draw(flow: Flow) -> None:
    try:
        curves.draw(flow.metrics, flow.folder / "curves.png")
    except MissingDependency as error:
        sys.stderr.write(f"no curves.png: {error}\n")


@contextmanager
def _interrupts_stop(flow: Flow) -> Iterator[None]:
    """The first Ctrl-C (or SIGTERM) asks for a clean end; a second one ends at once, and the replicas with it."""

    def stop(number: int, frame: object) -> None:
        if flow.stopping:
            flow.kill()
            os._exit(INTERRUPTED)
        sys.stderr.write("stopping after a checkpoint of what is trained; once more ends the run at once\n")
        flow.stop()

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
