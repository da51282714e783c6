"""The local executor: replicas as processes of this machine where they compute, as threads where they wait.

Stages that share a host share one process and its engine. A process that ends without saying so, by a signal or a
crash, is reported as failed with what is known of its end. No process outlives the executor: children end by
themselves when this process is gone.
"""

import atexit
import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path

from asyncflow.config.model import Pipeline
from asyncflow.execute.messages import Command, Event, Failed, Finished
from asyncflow.execute.replica import Assignment, Replica, main
from asyncflow.execute.spawn import fork, pipe, warm
from asyncflow.pipeline import StageSpec
from asyncflow.storage import TransferQueue

Report = Callable[[str, Event], None]
"""Takes the name of a replica and what happened there."""


def assignments(
    stages: Sequence[StageSpec], config: Pipeline, folder: Path, resume: Path | None = None
) -> list[Assignment]:
    """Decide which replicas there are: one for each copy of a host, one for each stage without a host."""
    hosts: dict[str, list[StageSpec]] = {}
    for stage in stages:
        if stage.build:
            hosts.setdefault(stage.host or stage.build, []).append(stage)
    threads = _threads(config, sum(own[0].replicas for own in hosts.values() if own[0].host))
    return [
        Assignment(f"{own[0].host or own[0].name}-{copy}", tuple(own), config, folder, resume, threads)
        for own in hosts.values()
        for copy in range(own[0].replicas)
    ]


def _threads(config: Pipeline, engines: int) -> int:
    cores = len(os.sched_getaffinity(0))
    if config.executor.threads is not None:
        return config.executor.threads
    return cores if config.mode == "colocated" else max(1, cores // engines)


@dataclass(frozen=True, slots=True)
class _Process:
    process: ForkServerProcess
    connection: Connection
    watcher: threading.Thread
    sending: threading.Lock


class LocalExecutor:
    """Starts replicas, passes commands down and events up, and ends everything."""

    def __init__(self, queue: TransferQueue, report: Report) -> None:
        self._queue, self._report = queue, report
        self._folder = tempfile.TemporaryDirectory(prefix="asyncflow-")
        self._processes: dict[str, _Process] = {}
        self._threads: dict[str, tuple[Replica, threading.Thread]] = {}

    def warm(self) -> None:
        """Begin with what takes longest in a start; returns at once."""
        warm()

    def start(self, jobs: Sequence[Assignment]) -> None:
        """Start every replica; each reports Ready or Failed."""
        atexit.register(self.kill)
        url = self._queue.serve(f"ipc://{self._folder.name}/queue")
        for job in jobs:
            if job.specs[0].host:
                self._processes[job.name] = self._start_process(job, url)
        for job in jobs:
            if not job.specs[0].host:
                self._threads[job.name] = self._start_thread(job)

    def send(self, replica: str, command: Command) -> None:
        """Pass a command on; one to a replica that has ended, or never began, is lost, and its end reported apart."""
        if replica in self._threads:
            self._threads[replica][0].obey(command)
        elif replica in self._processes:
            own = self._processes[replica]
            with own.sending, suppress(OSError):  # commands come from several threads, and go in one piece each
                own.connection.send(command)

    def stop(self, timeout: float) -> list[str]:
        """Wait until every replica has ended, kill the processes that have not, and return who was late."""
        deadline = time.monotonic() + timeout
        killed = []
        for name, own in self._processes.items():
            own.process.join(max(0.0, deadline - time.monotonic()))
            if own.process.is_alive():
                own.process.kill()
                killed.append(name)
            own.process.join()
            own.watcher.join(timeout=5.0)
            own.connection.close()
        for name, (_, thread) in self._threads.items():
            thread.join(max(0.0, deadline - time.monotonic()))
            if thread.is_alive():
                killed.append(name)
        self._folder.cleanup()
        atexit.unregister(self.kill)
        return killed

    def kill(self) -> None:
        """End every process at once."""
        for own in self._processes.values():
            own.process.kill()

    def _start_process(self, job: Assignment, url: str) -> _Process:
        ours, theirs = pipe()
        process = fork(main, (job, url, theirs), job.name, job.config.executor.start_timeout)
        theirs.close()
        watcher = threading.Thread(
            target=self._watch, args=(job.name, process, ours), name=f"watch:{job.name}", daemon=True
        )
        watcher.start()
        return _Process(process, ours, watcher, threading.Lock())

    def _start_thread(self, job: Assignment) -> tuple[Replica, threading.Thread]:
        replica = Replica(job, self._queue, partial(self._report, job.name))
        thread = threading.Thread(target=replica.serve, name=job.name, daemon=True)
        thread.start()
        return replica, thread

    def _watch(self, name: str, process: ForkServerProcess, connection: Connection) -> None:
        said_so = False
        while True:
            try:
                event = connection.recv()
            except (EOFError, OSError):
                break
            said_so |= isinstance(event, Failed | Finished)
            self._report(name, event)
        process.join()
        if not said_so:
            self._report(name, Failed(f"its process {process.pid} ended by {_end(process.exitcode)}"))


def _end(code: int | None) -> str:
    if code is not None and code < 0:
        return f"signal {signal.Signals(-code).name}"
    return f"exit code {code} without a report"
