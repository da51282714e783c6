"""Starting a process that is safe to start from anywhere.

Two things differ from plain `multiprocessing`. Ctrl-C reaches the whole process group, but only the main process
answers it: children are born with SIGINT and SIGTERM blocked, so none dies while it still starts; whoever spawns
ends them by command, or by SIGKILL. And the user's script is not imported again in the child, so a script, a
notebook or a prompt needs no `if __name__ == "__main__"`.
"""

import multiprocessing
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from types import ModuleType

_SPAWN = multiprocessing.get_context("spawn")
_HIDING = threading.Lock()


def pipe() -> tuple[Connection, Connection]:
    """Return the two ends of a connection that a spawned process can be given."""
    return _SPAWN.Pipe()


def spawn(target: Callable[..., None], args: tuple[object, ...], name: str) -> SpawnProcess:
    """Start a daemon process that runs `target(*args)`; both must be importable, not of `__main__`."""
    process = _SPAWN.Process(target=target, args=args, name=name, daemon=True)
    with _HIDING, _hidden_main(), _interrupts_blocked():
        process.start()
    return process


@contextmanager
def _hidden_main() -> Iterator[None]:
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


@contextmanager
def _interrupts_blocked() -> Iterator[None]:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
