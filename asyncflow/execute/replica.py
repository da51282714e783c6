"""A replica: one or more stages in a thread group, in this process or in one of its own.

Every stage loop is a thread; commands arrive on the side and are handed to each stage that takes commands. The
first error ends the replica and travels to the flow as text, with the stage's name and its traceback. A process ends
with it at once, as if it were killed: there is one way in which a replica dies, and the queue takes back what it held.
The trainer's alone stays until it is told to stop, since nothing begins in its place.
"""

import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib import import_module
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Protocol, runtime_checkable

from asyncflow.config.importing import resolve
from asyncflow.config.model import Pipeline
from asyncflow.errors import StorageError, WaitTimeout
from asyncflow.execute.messages import Applied, Apply, Command, Event, Failed, Finished, Ready, Stop
from asyncflow.execute.restarts import CAREFUL, final, restartable
from asyncflow.pipeline import StageSpec
from asyncflow.serve import run
from asyncflow.stage import Context, FunctionStage, Resources, Stage
from asyncflow.storage import TransferQueue
from asyncflow.storage.client import Lease, Stream


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
    failures: int = 0
    """How often in a row a replica of this name has failed before."""


def build(spec: StageSpec) -> Stage:
    """Load a stage: a class of ours, or a function of the user's."""
    module, _, name = spec.build.partition(":")
    if module.startswith("asyncflow.stages."):
        made: Stage = getattr(import_module(module), name)()
        return made
    return FunctionStage(resolve(spec.build))


def careful(spec: StageSpec, group_size: int) -> StageSpec:
    """Return a stage that takes one group at a time, if its rows stand alone, as with those of ours that write."""
    take = spec.take
    if not spec.build.startswith("asyncflow.stages.") or not spec.writes:
        return spec
    # Rows of a group come one after another.
    rows = group_size if spec.table == "train" else 1
    return replace(spec, take=replace(take, groups=1) if take.groups else replace(take, rows=rows))


class Replica:
    """Runs an assignment; `emit` may be called from any of its threads."""

    def __init__(
        self,
        assignment: Assignment,
        queue: TransferQueue,
        emit: Callable[[Event], None],
        end: Callable[[], None] | None = None,
    ) -> None:
        """After an error `end` is called, which ends the process; without it all loops are told to end."""
        self._assignment, self._queue, self._report = assignment, queue, emit
        self._end = end if end is not None else self._give_up
        self._stages: dict[str, Stage] = {}
        self._streams: list[Stream] = []
        self._stopping = threading.Event()
        self._failed = threading.Event()
        self._failing = threading.Lock()
        self._obeying = threading.Lock()
        self._armed = threading.Event()
        """Set when the stages may begin: an engine needs weights first."""
        if all(spec.host != "rollout" for spec in assignment.specs):
            self._armed.set()
        self.ready = False

    def serve(self) -> None:
        """Set up, serve until the data ends or the replica is stopped, close; never raises."""
        try:
            loops = self._setup()
        except BaseException as error:  # noqa: BLE001  the border of a replica: the error goes to the flow as text
            self._fail("setup", error)
            self._close()
            return
        self.ready = True
        self._emit(Ready())
        self._await_weights()
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
            self._armed.set()
        elif isinstance(command, Apply) and self._stopping.is_set():
            return
        with self._obeying:
            for name, stage in list(self._stages.items()):
                if isinstance(stage, Commanded):
                    try:
                        stage.command(command)
                    except BaseException as error:  # noqa: BLE001  as above
                        self._fail(f"{name}, command {type(command).__name__}", error)

    def _emit(self, event: Event) -> None:
        self._report(event)
        if isinstance(event, Applied):
            self._armed.set()

    def _await_weights(self) -> None:
        """Begin no request before there are weights: one that begins again gets the newest when it is ready."""
        executor, weights = self._assignment.config.executor, self._assignment.config.weights
        longest = executor.start_timeout + weights.timeout  # the trainer may still be starting
        if not self._armed.wait(longest):
            self._fail("wait for weights", WaitTimeout(f"waited {longest:g} s for the first weights to be applied"))

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
            again=job.failures > 0,
        )
        loops = []
        for spec in job.specs:
            own = replace(context, options=spec.options)
            if spec.build not in self._stages:
                made = build(spec)
                made.setup(own)
                self._stages[spec.build] = made
            loops.append(threading.Thread(target=self._lanes, args=(spec, own), name=self._named(spec), daemon=True))
        return loops

    def _named(self, spec: StageSpec) -> str:
        return f"{self._assignment.name}:{spec.table}"

    def _lanes(self, spec: StageSpec, context: Context) -> None:
        """Work on as many batches at once as the stage has lanes; first alone, if this may fail again."""
        stage = self._stages[spec.build]
        if self._assignment.failures >= CAREFUL:
            self._loop(careful(spec, context.config.train.group_size), stage, context, lambda lease: lease.attempt == 1)
        lanes = [
            threading.Thread(
                target=self._loop, args=(spec, stage, replace(context, lane=lane)), name=self._named(spec), daemon=True
            )
            for lane in range(1, spec.lanes)
        ]
        for lane in lanes:
            lane.start()
        self._loop(spec, stage, context)
        for lane in lanes:
            lane.join()

    def _loop(
        self, spec: StageSpec, stage: Stage, context: Context, until: Callable[[Lease], bool] = lambda lease: False
    ) -> None:
        try:
            run(spec, stage, self._queue, context, self._streams.append, until)
        except BaseException as error:  # noqa: BLE001  as above: code of the user's may call sys.exit
            if not self._stopping.is_set():
                self._fail(spec.name, error)

    def _fail(self, where: str, error: BaseException) -> None:
        """Report the first error, and end."""
        with self._failing:
            if self._failed.is_set():
                return
            self._failed.set()
            trace = "".join(traceback.format_exception(error))
            self._emit(Failed(f"in {where} of replica {self._assignment.name}\n{trace}", final(error)))
        if restartable(self._assignment.specs):
            self._end()

    def _give_up(self) -> None:
        """End the loops of a replica that shares its process with others."""
        self._stopping.set()
        self._armed.set()
        for stream in tuple(self._streams):
            with suppress(StorageError):
                stream.close()

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

    def end() -> None:
        with sending:  # no message is cut off
            os._exit(1)

    replicas: list[Replica] = []
    threading.Thread(target=_listen, args=(connection, replicas, emit), name="commands", daemon=True).start()
    try:
        with TransferQueue.open(url, timeout=assignment.config.executor.start_timeout) as queue:
            replicas.append(Replica(assignment, queue, emit, end))
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
        if replicas:  # what is sent before that is sent again when it is ready
            replicas[0].obey(command)


def _limit_threads(count: int) -> None:
    # There already, unless a program of the user's had started the fork server for itself.
    import_module("asyncflow.execute.preload")
    import torch

    torch.set_num_threads(count)
