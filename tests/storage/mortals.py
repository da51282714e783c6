"""Processes that work on a queue until they are killed.

`Nursery` starts one interpreter, which imports what is needed once and forks a process for each work: that takes
milliseconds. A work tells what it has done, a JSON value a line, over a socket, whose end is the end of the process.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from asyncflow.storage import Schema, TransferQueue, journal
from asyncflow.storage.client import Table
from asyncflow.storage.depot import Depot

PATIENCE = 120.0
"""Seconds after which a test gives up on a process; far more than a slow machine needs."""
WIDTH = 4
LARGE = 3000
"""Numbers in a cell of `cells`: a put of them goes through shared memory."""
COLUMNS = {"x": "int64", "cells": "list<int64>", "twice": "int64"}

Say = Callable[[Any], None]


def columns(start: int) -> dict[str, Any]:
    """Return a put that can be told from a part of it."""
    numbers = np.arange(start, start + WIDTH)
    return {"x": numbers, "cells": [np.full(LARGE, number) for number in numbers.tolist()]}


def begin(queue: TransferQueue) -> Table:
    """Create the table of these works."""
    table = queue.create_table("t", Schema(COLUMNS))
    table.task("use", reads=("x", "cells"), max_attempts=1000)
    return table


def produce(say: Say, url: str) -> None:
    """Put rows, and tell how many puts have returned."""
    table = TransferQueue.open(url, PATIENCE).table("t")
    for number in range(10**9):
        table.put(columns(number * WIDTH), timeout=PATIENCE)
        say(number + 1)


def get(say: Say, url: str) -> None:
    """Lease rows and keep them."""
    stream = TransferQueue.open(url, PATIENCE).table("t").stream("use", rows=1, credit=2)
    held = []
    while (lease := stream.next(PATIENCE)) is not None:
        held.append(lease)
        say(lease.id)


def ack(say: Say, url: str) -> None:
    """Lease rows, write what is made of them, acknowledge them, and tell which."""
    table = TransferQueue.open(url, PATIENCE).table("t")
    stream = table.stream("use", rows=2)
    while (lease := stream.next(PATIENCE)) is not None:
        table.write(lease.rows, {"twice": 2 * lease.batch["x"].array}, lease)
        lease.done()
        say(lease.rows.tolist())


def save(say: Say, url: str, folder: str) -> None:
    """Ask for snapshots."""
    queue = TransferQueue.open(url, PATIENCE)
    for number in range(10**9):
        queue.snapshot(folder, PATIENCE)
        say(number)


def hold(say: Say, url: str, least: int | None = None, **options: Any) -> None:
    """Hold and serve a queue; a log of more than `least` bytes begins anew."""
    if least is not None:
        journal._LEAST = least
    queue = TransferQueue.open(**options)
    begin(queue)
    queue.serve(url)
    say("serving")
    signal.pause()


def unit(say: Say, controller: str, url: str) -> None:
    """Be a storage unit."""
    Depot(controller, url, PATIENCE)
    say("joined")
    signal.pause()


WORKS: dict[str, Callable[..., None]] = {work.__name__: work for work in (produce, get, ack, save, hold, unit)}


def until(true: Callable[[], bool]) -> None:
    """Wait for what another process brings about."""
    end = time.monotonic() + PATIENCE
    while not true():
        assert time.monotonic() < end
        time.sleep(0.001)


class Mortal:
    """A process at its work."""

    def __init__(self, connection: socket.socket) -> None:
        connection.settimeout(PATIENCE)
        self._connection, self._said = connection, connection.makefile("r")
        self.pid: int = self.hear()
        self._process = os.pidfd_open(self.pid)  # a number could be another process's by the time it is used

    def hear(self) -> Any:
        """Return what it says next; it must not have ended."""
        line = self._said.readline()
        assert line.endswith("\n"), "the process ended by itself"
        return json.loads(line)

    def kill(self) -> None:
        """Kill it, wherever it just is."""
        signal.pidfd_send_signal(self._process, signal.SIGKILL)

    def stop(self) -> None:
        """Have it do nothing, as if its host hung."""
        signal.pidfd_send_signal(self._process, signal.SIGSTOP)

    def go_on(self) -> None:
        """Have it go on after a stop."""
        signal.pidfd_send_signal(self._process, signal.SIGCONT)

    def rest(self) -> list[Any]:
        """Wait for its end, and return what it had said until then."""
        said = [json.loads(line) for line in self._said if line.endswith("\n")]
        os.close(self._process)
        self._said.close()
        self._connection.close()
        return said


class Nursery:
    """Starts mortals."""

    def __init__(self, folder: Path) -> None:
        self._path = str(folder / "nursery")
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(self._path)
        self._listener.listen()
        self._listener.settimeout(PATIENCE)
        command = [sys.executable, "-m", __name__, self._path]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2])

    def start(self, work: Callable[..., None], **arguments: Any) -> Mortal:
        """Start a work, and return once its process is there."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([work.__name__, arguments]) + "\n")
        self._process.stdin.flush()
        return Mortal(self._listener.accept()[0])

    def close(self) -> None:
        """End the nursery."""
        self._process.communicate(timeout=PATIENCE)
        self._listener.close()


def nursery(folder: Path) -> Iterator[Nursery]:
    """Keep a nursery as long as it is needed: the body of a fixture."""
    made = Nursery(folder)
    yield made
    made.close()


def _main(path: str) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for those that die
    for line in sys.stdin:
        work, arguments = json.loads(line)
        if os.fork() == 0:
            try:
                with socket.socket(socket.AF_UNIX) as connection:
                    connection.connect(path)
                    _say(connection, os.getpid())
                    WORKS[work](lambda said: _say(connection, said), **arguments)
            finally:
                os._exit(1)


def _say(connection: socket.socket, said: Any) -> None:
    connection.sendall(json.dumps(said).encode() + b"\n")


if __name__ == "__main__":
    _main(sys.argv[1])
