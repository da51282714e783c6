"""A queue with storage units on this host: the controller in this process, each unit in a process of its own.

A unit that dies is replaced by an empty one; units end by themselves when the controller does.
"""

import logging
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import TracebackType

from asyncflow.errors import StorageError
from asyncflow.storage.controller import Controller
from asyncflow.storage.depot import Depot
from asyncflow.storage.link import EmbeddedLink
from asyncflow.storage.spill import Spill
from asyncflow.storage.units import Recompute, Units

log = logging.getLogger(__name__)

START = 120.0
"""Seconds that units may take to join."""
_END = 10.0
# A unit that ends so often within a minute will not do better the next time.
_RESTARTS = 5


class Host:
    """Serves a queue whose cells are held by units, until it is closed."""

    def __init__(
        self,
        url: str,
        units: int,
        restore: Path | None = None,
        recompute: Recompute | None = None,
        keys: Path | None = None,
        timeout: float = START,
        memory_limit: int | None = None,
        spill: "str | os.PathLike[str] | None" = None,
        encrypt_bulk: bool = False,
    ) -> None:
        """Serve at `url` once so many units have joined, with the tables of a snapshot if one is named.

        Each unit keeps cells above `memory_limit` bytes in files in the folder `spill`.
        """
        Spill.chosen(memory_limit, spill)  # what no unit could begin with is told here
        self._options = [] if spill is None else ["--memory", str(memory_limit), "--spill", os.path.abspath(spill)]
        if units < 1:
            raise StorageError(f"a queue with storage units has at least one, not {units}")
        self._units, self._keys = Units(recompute, keys), keys
        self._encrypt_bulk = encrypt_bulk
        controller = Controller(units=self._units)
        self._link = EmbeddedLink(controller)
        self._lock = threading.Lock()
        self._ending = False
        self._processes: list[subprocess.Popen[bytes]] = []
        self._watches: list[threading.Thread] = []
        try:
            self.url = self._link.serve(url, keys, encrypt_bulk)
            for number in range(units):
                watch = threading.Thread(target=self._keep, args=(number,), name="asyncflow-unit", daemon=True)
                self._watches.append(watch)
                watch.start()
            self._join(units, timeout)
            if restore is not None:
                from asyncflow.storage import moving

                moving.restore(controller, self._units, restore, keys)
        except BaseException:
            self.close()
            raise

    def _join(self, units: int, timeout: float) -> None:
        end = time.monotonic() + timeout
        while not self._units.wait(units, min(1.0, max(0.0, end - time.monotonic()))):
            if time.monotonic() >= end or not any(watch.is_alive() for watch in self._watches):
                raise StorageError(f"{len(self._units.urls)} of {units} storage units joined {self.url}")

    def _keep(self, number: int) -> None:
        """Run a unit, and another one when it has died."""
        started: list[float] = []
        while len(started) < _RESTARTS or time.monotonic() - started[-_RESTARTS] > 60:
            with self._lock:
                if self._ending:
                    return
                command = [*_command(self.url, number, self._keys), *self._options]
                process = subprocess.Popen(command, stdin=subprocess.DEVNULL)
                self._processes.append(process)
            started.append(time.monotonic())
            code = process.wait()
            with self._lock:
                self._processes.remove(process)
                if self._ending:
                    return
            log.error("storage unit %d of %s ended with code %d: another one takes its place", number, self.url, code)
        log.error("storage unit %d of %s ended %d times within a minute: it is left", number, self.url, _RESTARTS)

    def close(self) -> None:
        """End the queue and its units; idempotent."""
        with self._lock:
            self._ending = True
            processes = list(self._processes)
        self._link.close()
        for process in processes:
            process.terminate()
        for watch in self._watches:
            watch.join(_END)
        for process in processes:
            if process.poll() is None:
                process.kill()

    def __enter__(self) -> "Host":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _command(controller: str, number: int, keys: Path | None) -> list[str]:
    # Beside the controller, and for the same clients: at its path, or at any port of its interface.
    at = f"{controller}.{number}" if controller.startswith("ipc://") else f"{controller.rpartition(':')[0]}:*"
    command = [sys.executable, "-m", "asyncflow", "storage", "unit", controller, "--url", at]
    return command if keys is None else [*command, "--keys", str(keys)]


def serve_unit(
    controller: str,
    url: str,
    keys: Path | None,
    ended: threading.Event,
    spill: Spill | None = None,
    encrypt_bulk: bool = False,
) -> None:
    """Be a unit of a queue until the queue is over, or `ended` is set by somebody."""
    depot = Depot(controller, url, START, ended, keys, spill, encrypt_bulk)
    try:
        ended.wait()
    finally:
        depot.close()
