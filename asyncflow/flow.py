"""A run as its user holds it.

    flow = Flow.from_yaml("pipeline.yaml").start()
    summary = flow.wait()

Everything that can be refused is refused when the flow is made, before a process is started or a folder written.
"""

import json
import logging
import shutil
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from asyncflow import checkpoint
from asyncflow.conductor import Conductor, Materials
from asyncflow.config.load import load
from asyncflow.config.model import Pipeline
from asyncflow.config.schema import dump
from asyncflow.data.prompts import Prompts, prompts
from asyncflow.data.sources import items
from asyncflow.data.tokenizer import agree, tokenizer
from asyncflow.errors import CheckpointError, ConfigError, WaitTimeout
from asyncflow.lock import Lock
from asyncflow.observe.metrics import Metrics, Record
from asyncflow.observe.summary import Summary, summarise
from asyncflow.observe.trace import TRACE, Trace
from asyncflow.stages import Plan, plan, reference

Dataset = Sequence[Mapping[str, Any]]

log = logging.getLogger(__name__)
CONFIG = "config.yaml"
"""The file of a run's folder with its settings, which is there first."""


class Flow:
    """One run of one pipeline; start it once, from any thread."""

    def __init__(
        self,
        config: Pipeline,
        *,
        dataset: Dataset | None = None,
        resume: Path | None = None,
        folder: Path | None = None,
    ) -> None:
        """Check the configuration; `dataset` are the items of `data: {source: python}`.

        The run goes on in `folder`, from the checkpoint `resume` or from its beginning; without, it gets a new folder
        that is named as the configuration says.
        """
        self.config = config
        self.plan: Plan = plan(config)
        self._dataset, self._resume, self._claimed = dataset, resume, folder is not None
        self.folder = folder if folder is not None else _free(Path(config.output.folder))
        self.metrics = Metrics(self.folder / "metrics.jsonl")
        self.conductor: Conductor | None = None
        self._thread = threading.Thread(target=self._run, name="asyncflow", daemon=True)
        self._stop_asked = threading.Event()
        self._result: Summary | BaseException | None = None

    @classmethod
    def from_yaml(cls, path: str | Path, *overrides: str, dataset: Dataset | None = None) -> Self:
        """Read a pipeline file; overrides are `section.key=value`. ConfigError holds every mistake found."""
        return cls(load([Path(path)], overrides).pipeline, dataset=dataset)

    @classmethod
    def resume(cls, folder: str | Path, *, dataset: Dataset | None = None) -> Self:
        """Go on from the newest checkpoint of a run's folder, exactly where it was taken; without one, begin again."""
        folder = Path(folder)
        if not (folder / CONFIG).exists():
            raise CheckpointError(f"{folder} holds no run")
        found = newest_checkpoint(folder)
        Lock(folder).close()  # whoever has it now would be disturbed; it is taken when the run starts
        config = load([folder / CONFIG], ()).pipeline
        if is_complete(folder):
            raise CheckpointError(f"the run in {folder} is complete: nothing is left to resume")
        return cls(config, dataset=dataset, resume=found, folder=folder)

    @classmethod
    def go_on(cls, config: Pipeline, *, dataset: Dataset | None = None) -> Self:
        """Resume the last run of `output.folder`, if there is one; else begin one.

        So the same command starts a run and goes on with it, however often it is interrupted. ConfigError if that run
        has other settings; where it has no checkpoint yet, one with these is begun beside it.
        """
        last = last_run(Path(config.output.folder))
        if last is None:
            return cls(config, dataset=dataset)
        if not checkpoints(last) and (last / CONFIG).read_text(encoding="utf-8") != dump(config):
            return cls(config, dataset=dataset)
        before = load([last / CONFIG], ()).pipeline
        other = list(_differences(before.model_dump(), config.model_dump()))
        if other:
            raise ConfigError(
                f"the run in {last} was begun with other settings: {'; '.join(other)}. Go on as it was begun with "
                f"`asyncflow resume {last}`, or begin anew without --resume"
            )
        return cls.resume(last, dataset=dataset)

    @property
    def records(self) -> list[Record]:
        """Metrics so far, oldest first."""
        return list(self.metrics.records)

    @property
    def phase(self) -> str:
        """What the run is doing now."""
        if self._result is not None:
            return "ended"
        return self.conductor.phase if self.conductor is not None else "preparing"

    @property
    def stopping(self) -> bool:
        """Whether a clean end was asked for."""
        return self._stop_asked.is_set()

    def start(self) -> Self:
        """Start in the background and return at once."""
        self._thread.start()
        return self

    def join(self) -> None:
        """Wait for the end, whatever it is."""
        self._thread.join()

    def wait(self, timeout: float | None = None) -> Summary:
        """Wait for the end and return the summary; raise what ended the run, or WaitTimeout."""
        self._thread.join(timeout)
        if self._result is None:
            raise WaitTimeout(f"waited {timeout} s for the run in {self.folder} to end; it is {self.phase}")
        if isinstance(self._result, BaseException):
            raise self._result
        return self._result

    def stop(self) -> None:
        """Ask for a clean end: a checkpoint of what is trained, and no process left; `wait` tells when."""
        self._stop_asked.set()
        if self.conductor is not None:
            self.conductor.board.stop()

    def kill(self) -> None:
        """End every process of the run at once, without a checkpoint."""
        if self.conductor is not None:
            self.conductor.executor.kill()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
        self._thread.join()

    def _run(self) -> None:
        try:
            self._result = self._conduct()
        except BaseException as error:  # noqa: BLE001  the border of the thread: `wait` raises it
            self._result = error
        finally:
            self.metrics.close()

    def _conduct(self) -> Summary:
        if not self._claimed:
            self._claim()
        with closing(Lock(self.folder)):
            if self._claimed:
                self._stand_where_it_was()
            return self._lead()

    def _stand_where_it_was(self) -> None:
        """Leave of the folder what the run goes on from: nothing, where it begins again."""
        if self._resume is None:
            shutil.rmtree(self.folder / reference.FOLDER, ignore_errors=True)
            self.metrics.restore(-1)
        else:
            self.metrics.restore(int(checkpoint.progress(self._resume)["version"]))

    def _lead(self) -> Summary:
        with Trace(self.folder / TRACE if self.config.output.trace else None) as trace:
            self.metrics.listeners.append(trace.record)
            conductor = Conductor(
                self.config, self.folder, self.plan, self._materials, self.metrics, self._resume, trace
            )
            self.conductor = conductor
            if self._stop_asked.is_set():
                conductor.board.stop()
            complete = conductor.run()
        summary = summarise(
            self.folder,
            self.metrics,
            conductor.ledger,
            seconds=conductor.train_seconds,
            since=conductor.steps_before,
            complete=complete,
        )
        summary.values["restarts"] = dict(conductor.restarts.counts)
        summary.values["reward/workers_replaced"] = conductor.board.trouble.replaced
        summary.values["reward/retried"] = conductor.board.trouble.retried
        if conductor.too_long:
            summary.values["data/left_out_as_too_long"] = conductor.too_long
        summary.write()
        return summary

    def _claim(self) -> None:
        """Take a folder that no other run has, by being the one that creates its configuration."""
        while True:
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
                with (self.folder / CONFIG).open("x", encoding="utf-8") as file:
                    file.write(dump(self.config))
                return
            except FileExistsError:
                self.folder = _free(Path(self.config.output.folder))
                self.metrics.path = self.folder / "metrics.jsonl"
            except OSError as error:
                raise ConfigError(f"output.folder: {self.folder} cannot be made: {error.strerror}") from error

    def _materials(self) -> Materials:
        config, read = self.config, items(self.config.data, self._dataset, self.config.seed)
        names = tokenizer(config.model)  # after the items, in which mistakes are likelier and found sooner
        if config.teacher is not None:
            agree(names, config.teacher.path)
        found = prompts(read, names, config.data, config.data.source)
        held_out: Prompts | None = None
        if config.eval.source is not None:
            other = config.data.model_copy(update={"source": config.eval.source, "size": config.eval.rows})
            held_out = prompts(items(other, None, config.seed + 1), names, other, other.source)
        elif config.eval.rows:
            found, held_out = found.split(config.eval.rows, config.seed)
        return Materials(found, held_out, names)


def newest_checkpoint(folder: Path) -> Path | None:
    """Return the checkpoint of a run that has the highest version; None if there is none.

    One that is damaged is left aside, with a warning, if there is another; else it is a CheckpointError.
    """
    versions: dict[Path, int] = {}
    damaged: CheckpointError | None = None
    for path in checkpoints(folder):
        try:
            versions[path] = int(checkpoint.progress(path)["version"])
        except CheckpointError as error:
            log.warning("%s; it is left aside", error)
            damaged = error
    if damaged is not None and not versions:
        raise damaged
    return max(versions, key=lambda path: versions[path], default=None)


def checkpoints(folder: Path) -> list[Path]:
    """Return the whole checkpoints of a run's folder."""
    patterns = ("checkpoint/progress.json", ".checkpoint.old/progress.json", "checkpoints/step-*/progress.json")
    return [path.parent for pattern in patterns for path in folder.glob(pattern)]


def is_complete(folder: Path) -> bool:
    """Whether the run of a folder came to its end."""
    try:
        values = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return False  # The summary is the last thing that a run writes.
    return isinstance(values, dict) and bool(values.get("complete"))


def last_run(wanted: Path) -> Path | None:
    """Return the folder of the last run that was begun in this one, or in a numbered one beside it."""
    folder, number, last = wanted, 1, None
    while (folder / CONFIG).exists():
        number, last = number + 1, folder
        folder = wanted.with_name(f"{wanted.name}-{number}")
    return last


def _differences(before: Mapping[str, Any], now: Mapping[str, Any], within: str = "") -> Iterator[str]:
    for name in now:
        one, other = before.get(name), now[name]
        if isinstance(one, dict) and isinstance(other, dict):
            yield from _differences(one, other, f"{within}{name}.")
        elif one != other:
            yield f"{within}{name} {one!r}, now {other!r}"


def _free(wanted: Path) -> Path:
    """Return the wanted folder, or the first numbered one beside it that holds no run."""
    blocked = next((path for path in (wanted, *wanted.parents) if path.exists() and not path.is_dir()), None)
    if blocked is not None:
        raise ConfigError(f"output.folder: {blocked} is not a folder")
    last = last_run(wanted)
    if last is None:
        return wanted
    number = 1 if last == wanted else int(last.name.rpartition("-")[2])
    return wanted.with_name(f"{wanted.name}-{number + 1}")
