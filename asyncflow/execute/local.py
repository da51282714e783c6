"""The local executor: replicas as processes of this machine where they compute, as threads where they wait.

Stages that share a host share one process and its engine. A process that ends without saying so, by a signal or a
crash, is reported as failed with what is known of its end. Each replica has a thread that watches it, and that starts
another in its place if whoever hears of the failure says so. No process outlives the executor: children end by
themselves when this process is gone.
"""

import atexit
import os
import signal
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path

from asyncflow.config.model import Pipeline
from asyncflow.errors import StorageError
from asyncflow.execute.life import Fell, Life, Report
from asyncflow.execute.messages import Command, Failed, Stop
from asyncflow.execute.replica import Assignment, Replica, main
from asyncflow.execute.spawn import fork, pipe, warm
from asyncflow.pipeline import StageSpec
from asyncflow.storage import TransferQueue


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
        Assignment(f"{own[0].host or own[0].name}-{copy}", tuple(own), config, folder, resume, threads, copy)
        for own in hosts.values()
        for copy in range(own[0].replicas)
    ]


def _threads(config: Pipeline, engines: int) -> int:
    cores = len(os.sched_getaffinity(0))
    if config.executor.threads is not None:
        return config.executor.threads
    # Sums that as many threads share out are the same to the last bit.
    return cores if config.mode == "colocated" and not config.deterministic else max(1, cores // engines)


@dataclass(frozen=True, slots=True)
class _Process:
    process: ForkServerProcess
    connection: Connection
    sending: threading.Lock = field(default_factory=threading.Lock)

    def send(self, command: Command) -> None:
        with self.sending, suppress(OSError):  # commands come from several threads, and go in one piece each
            self.connection.send(command)


class LocalExecutor:
    """Starts replicas, passes commands down and events up, and ends everything."""

    def __init__(self, queue: TransferQueue, report: Report, fell: Fell) -> None:
        self._queue, self._report, self._fell = queue, report, fell
        self._folder = tempfile.TemporaryDirectory(prefix="asyncflow-")
        self._url = ""
        self._processes: dict[str, _Process] = {}
        self._replicas: dict[str, Replica] = {}
        """Those that are threads."""
        self._watchers: dict[str, threading.Thread] = {}
        self._ending = threading.Event()
        self._beginning = threading.Lock()
        """Held while a replica is begun: none is after the end."""

    @property
    def pids(self) -> dict[str, int | None]:
        """Process ids of the replicas that are processes."""
        return {name: own.process.pid for name, own in tuple(self._processes.items())}

    def warm(self) -> None:
        """Begin with what takes longest in a start; returns at once."""
        warm()

    def start(self, jobs: Sequence[Assignment]) -> None:
        """Start every replica; each reports Ready, or is said to have failed."""
        atexit.register(self.kill)
        self._url = self._queue.serve(f"ipc://{self._folder.name}/queue")
        for job in (replace(job, rendezvous=f"{self._folder.name}/ranks") for job in jobs):
            if job.specs[0].host:
                self._keep(job.name, self._fork(job))
                self._watch(self._watch_process, job)
        for job in jobs:
            if not job.specs[0].host:
                self._watch(self._run_thread, job)

    def send(self, replica: str, command: Command) -> None:
        """Pass a command on; one to a replica that has ended, or never began, is lost, and its end reported apart."""
        if replica in self._replicas:
            self._replicas[replica].obey(command)
        elif replica in self._processes:
            self._processes[replica].send(command)

    def stop(self, timeout: float) -> list[str]:
        """Wait until every replica has ended, kill the processes that have not, and return who was late."""
        deadline = time.monotonic() + timeout
        with self._beginning:
            self._ending.set()
        for own in self._processes.values():
            own.send(Stop())  # to those that have begun again after they were told
        for replica in tuple(self._replicas.values()):
            replica.obey(Stop())
        killed = []
        for name, own in self._processes.items():
            own.process.join(max(0.0, deadline - time.monotonic()))
            if own.process.is_alive():
                own.process.kill()
                killed.append(name)
            own.process.join()
        for name, watcher in self._watchers.items():
            ends = time.monotonic() + 5.0 if name in self._processes else deadline
            watcher.join(max(0.0, ends - time.monotonic()))
            if watcher.is_alive():
                killed.append(name)
        self._folder.cleanup()
        atexit.unregister(self.kill)
        return killed

    def kill(self) -> None:
        """End every process at once."""
        self._ending.set()
        for own in tuple(self._processes.values()):
            own.process.kill()

    def _watch(self, target: Callable[[Assignment], None], job: Assignment) -> None:
        def watch() -> None:
            try:
                target(job)
            except Exception:  # noqa: BLE001  the border of this thread: nobody else would tell of the replica's end
                report = f"nobody watches it any more\n{traceback.format_exc()}"
                self._fell(job.name, Failed(report, final=True))

        watcher = threading.Thread(target=watch, name=f"watch:{job.name}", daemon=True)
        self._watchers[job.name] = watcher
        watcher.start()

    def _fork(self, job: Assignment) -> _Process:
        ours, theirs = pipe()
        process = fork(main, (job, self._url, theirs), job.name, job.config.executor.start_timeout)
        theirs.close()
        return _Process(process, ours)

    def _keep(self, name: str, own: _Process) -> None:
        """Take in a process that has begun, or end it if this comes too late."""
        with self._beginning:
            self._processes[name] = own
            if self._ending.is_set():
                own.process.kill()

    def _watch_process(self, job: Assignment) -> None:
        while True:
            failures = self._live_through(job, self._processes[job.name])
            while failures:
                job = replace(job, failures=failures)
                try:
                    self._keep(job.name, self._fork(job))
                    break
                except (StorageError, OSError) as error:
                    failures = self._fell(job.name, Failed(f"it could not be started again: {error}"))
            if not failures:
                return

    def _live_through(self, job: Assignment, own: _Process) -> int:
        """Pass on what a process says until it ends; return how often it has failed, if it is to begin again."""
        life = Life(job, self._report, self._fell)
        with suppress(EOFError, OSError):
            while own.connection.poll(life.patience):
                life.take(own.connection.recv())
            life.take(Failed(f"its process {own.process.pid} did not {life.awaited} in time"))
            own.process.kill()
        own.process.join(job.config.executor.stop_timeout)
        own.process.kill()
        own.process.join()
        own.connection.close()
        return life.ended(f"its process {own.process.pid} ended by {_end(own.process.exitcode)}", self._ending.is_set())

    def _run_thread(self, job: Assignment) -> None:
        failures = job.failures
        while True:
            job = replace(job, failures=failures)
            life = Life(job, self._report, self._fell)
            with self._beginning:
                if self._ending.is_set():
                    return
                replica = self._replicas[job.name] = Replica(job, self._queue, life.take)
            replica.serve()
            failures = life.ended("its thread ended without a report", self._ending.is_set())
            if not failures:
                return


def _end(code: int | None) -> str:
    if code is not None and code < 0:
        return f"signal {signal.Signals(-code).name}"
    return f"exit code {code} without a report"
