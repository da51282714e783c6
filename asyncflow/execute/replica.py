"""A replica: one or more stages in a thread group, in this process or in one of its own.

Every stage loop is a thread; commands arrive on the side and are handed to each stage that takes commands. The
first error ends the replica and travels to the flow as text, with the stage's name and its traceback.
"""

import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib import import_module
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Protocol, runtime_checkable

from asyncflow.config.importing import resolve
from asyncflow.config.model import Pipeline
from asyncflow.errors import StorageError
from asyncflow.execute.messages import Apply, Command, Event, Failed, Finished, Ready, Stop
from asyncflow.pipeline import StageSpec
from asyncflow.stage import Context, FunctionStage, Resources, Stage, run
from asyncflow.storage import TransferQueue


@runtime_checkable
class Commanded(Protocol):
    """A stage that takes commands beside its rows."""

    def command(self, command: Command) -> None:
        """Obey; called in a thread of its own while `process` may be running."""


@dataclass(frozen=True, slots=True)
class Assignment:
    """What one replica runs."""

    name: str
    specs: tuple[StageSpec, ...]
    config: Pipeline
    folder: Path
    resume: Path | None = None
    threads: int = 1
    rank: int = 0
    """Which copy of its stages it is."""
    rendezvous: str = ""
    """Where copies find each other that share batches."""


def build(spec: StageSpec) -> Stage:
    """Load a stage: a class of ours, or a function of the user's."""
    module, _, name = spec.build.partition(":")
    if module.startswith("asyncflow.stages."):
        made: Stage = getattr(import_module(module), name)()
        return made
    return FunctionStage(resolve(spec.build))


class Replica:
    """Runs an assignment; `emit` may be called from any of its threads."""

    def __init__(self, assignment: Assignment, queue: TransferQueue, emit: Callable[[Event], None]) -> None:
        self._assignment, self._queue, self._emit = assignment, queue, emit
        self._stages: dict[str, Stage] = {}
        self._stopping = threading.Event()
        self._failed = threading.Event()
        self._obeying = threading.Lock()
        self.ready = False

    def serve(self) -> None:
        """Set up, serve until the data ends or the replica is stopped, close; never raises."""
        try:
            loops = self._setup()
        except Exception:  # noqa: BLE001  the border of a replica: the error goes to the flow as text
            self._fail("setup")
            self._close()
            return
        self.ready = True
        self._emit(Ready())
        for loop in loops:
            loop.start()
        for loop in loops:
            loop.join()
        self._close()
        if not self._failed.is_set():
            self._emit(Finished())

    def obey(self, command: Command) -> None:
        """Hand a command to every stage that takes commands; an error in one is reported as the replica's end."""
        if isinstance(command, Stop):
            self._stopping.set()
        elif isinstance(command, Apply) and self._stopping.is_set():
            return
        with self._obeying:
            for name, stage in list(self._stages.items()):
                if isinstance(stage, Commanded):
                    try:
                        stage.command(command)
                    except Exception:  # noqa: BLE001  as above
                        self._fail(f"{name}, command {type(command).__name__}")

    def _setup(self) -> list[threading.Thread]:
        job = self._assignment
        context = Context(
            config=job.config,
            replica=job.name,
            folder=job.folder,
            emit=self._emit,
            resume=job.resume,
            rank=job.rank,
            rendezvous=job.rendezvous,
            resources=Resources(),
            stopping=self._stopping,
        )
        loops = []
        for spec in job.specs:
            own = replace(context, options=spec.options)
            if spec.build not in self._stages:
                made = build(spec)
                made.setup(own)
                self._stages[spec.build] = made
            loops += [
                threading.Thread(target=self._loop, args=(spec, own), name=f"{job.name}:{spec.table}", daemon=True)
                for _ in range(spec.lanes)
            ]
        return loops

    def _loop(self, spec: StageSpec, context: Context) -> None:
        try:
            run(spec, self._stages[spec.build], self._queue, context)
        except Exception:  # noqa: BLE001  as above
            if not self._stopping.is_set():
                self._fail(spec.name)

    def _fail(self, where: str) -> None:
        self._failed.set()
        self._emit(Failed(f"in {where} of replica {self._assignment.name}\n{traceback.format_exc()}"))

    def _close(self) -> None:
        with self._obeying:
            for stage in self._stages.values():
                stage.close()
            self._stages.clear()


def main(assignment: Assignment, url: str, connection: Connection) -> None:
    """Run a replica as the main function of a process; ends when its data ends or when the parent is gone."""
    # Ctrl-C is for the main process to answer, also where a program of the user's started the fork server before.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    sys.path.insert(0, os.getcwd())
    _limit_threads(assignment.threads)
    _serve(assignment, url, connection)


def _serve(assignment: Assignment, url: str, connection: Connection) -> None:
    sending = threading.Lock()

    def emit(event: Event) -> None:
        with sending:
            connection.send(event)

    replicas: list[Replica] = []
    threading.Thread(target=_listen, args=(connection, replicas, emit), name="commands", daemon=True).start()
    try:
        with TransferQueue.open(url, timeout=assignment.config.executor.start_timeout) as queue:
            replicas.append(Replica(assignment, queue, emit))
            replicas[0].serve()
    except StorageError:
        emit(Failed(f"before its setup\n{traceback.format_exc()}"))


def _listen(connection: Connection, replicas: list[Replica], emit: Callable[[Event], None]) -> None:
    while True:
        try:
            command = connection.recv()
        except (EOFError, OSError):
            os._exit(1)  # The parent is gone, and with it every reason to go on.
        if isinstance(command, Stop) and not (replicas and replicas[0].ready):
            emit(Finished())
            os._exit(0)  # Nothing is begun yet, and what is being loaded is not needed any more.
        replicas[0].obey(command)


def _limit_threads(count: int) -> None:
    # There already, unless a program of the user's had started the fork server for itself.
    import_module("asyncflow.execute.preload")
    import torch

    torch.set_num_threads(count)
