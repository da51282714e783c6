"""Starting a process that is safe to start from anywhere.

Two things differ from plain `multiprocessing`. Ctrl-C reaches the whole process group, but only the main process
answers it: children are born with SIGINT and SIGTERM blocked, so none dies while it still starts; whoever spawns
ends them by command, or by SIGKILL. And the user's script is not imported again in the child, so a script, a
notebook or a prompt needs no `if __name__ == "__main__"`.

Engines are forked from a server process that has loaded torch and transformers and done nothing else: loading them
is most of what a start costs, and this way it is paid once for all replicas and all runs of a program.
"""

import multiprocessing
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, InvalidStateError
from contextlib import contextmanager, suppress
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess, SpawnProcess
from types import ModuleType

from asyncflow.errors import WaitTimeout

_SPAWN = multiprocessing.get_context("spawn")
_FORKSERVER = multiprocessing.get_context("forkserver")
_HIDING = threading.Lock()


def pipe() -> tuple[Connection, Connection]:
    """Return the two ends of a connection that a spawned process can be given."""
    return _SPAWN.Pipe()


def spawn(target: Callable[..., None], args: tuple[object, ...], name: str) -> SpawnProcess:
    """Start a daemon process that runs `target(*args)`; both must be importable, not of `__main__`."""
    process = _SPAWN.Process(target=target, args=args, name=name, daemon=True)
    _start(process)
    return process


def warm() -> None:
    """Begin to load the engines' libraries, in the server that `fork` needs; returns at once."""
    _FORKSERVER.set_forkserver_preload(["asyncflow.execute.preload"])
    with _HIDING, interrupts_blocked():
        forkserver.ensure_running()


def fork(target: Callable[..., None], args: tuple[object, ...], name: str, timeout: float) -> ForkServerProcess:
    """Start a daemon process as `spawn` does, once what `warm` loads is loaded; WaitTimeout if that takes too long."""
    warm()  # whoever comes first decides what the server loads
    process = _FORKSERVER.Process(target=target, args=args, name=name, daemon=True)
    started: Future[None] = Future()
    threading.Thread(target=_settle, args=(process, started), name=f"start:{name}", daemon=True).start()
    try:
        started.result(timeout)
    except TimeoutError:
        started.cancel()
        raise WaitTimeout(f"{name}: the libraries of the engines were not loaded within {timeout:g} s") from None
    return process


def _settle(process: ForkServerProcess, started: "Future[None]") -> None:
    try:
        _start(process)
    except BaseException as error:  # noqa: BLE001  the border of the thread: the one who waits raises it
        with suppress(InvalidStateError):
            started.set_exception(error)
        return
    try:
        started.set_result(None)
    except InvalidStateError:  # nobody waits any more, so nobody would ever end it
        process.kill()


def _start(process: SpawnProcess | ForkServerProcess) -> None:
    with _HIDING, _hidden_main(), interrupts_blocked():
        try:
            process.start()
        except (EOFError, ConnectionError):  # the server ended while it loaded, with the run that had started it
            process.start()


@contextmanager
def _hidden_main() -> Iterator[None]:
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


@contextmanager
def interrupts_blocked() -> Iterator[None]:
    """Keep SIGINT and SIGTERM from this thread, and from what it starts."""
    resource_tracker.ensure_running()  # would unblock both at its end, if it were started by what follows
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
