"""`asyncflow storage start`, `unit`, `inspect` and `keys`: serve a queue, hold cells for one, look at one."""

import signal
import sys
import threading
from contextlib import ExitStack
from pathlib import Path

from asyncflow.errors import MissingDependency, QueueClosed, StorageError, WaitTimeout
from asyncflow.storage import TransferQueue
from asyncflow.storage.prometheus import exposition
from asyncflow.storage.spill import Spill, size_of
from asyncflow.storage.status import MemoryStatus, QueueStatus, TableStatus, TaskCounts, Wait

FAILED, USAGE = 1, 2


def start(
    url: str,
    keys: Path | None = None,
    units: int = 0,
    restore: Path | None = None,
    durability: str = "memory",
    folder: str | None = None,
    memory: str | None = None,
    spill: Path | None = None,
    encrypt_bulk: bool = False,
) -> int:
    """Serve a queue until Ctrl-C or SIGTERM, empty or that of a folder; print its address once it accepts."""
    ends = {signal.SIGINT, signal.SIGTERM}
    # Blocked before any thread is made, so that no signal is lost and only `sigwait` sees one.
    signal.pthread_sigmask(signal.SIG_BLOCK, ends)
    try:
        with ExitStack() as stack:
            queue = _served(stack, url, keys, units, restore, durability, folder, memory, spill, encrypt_bulk)
            print(queue, flush=True)
            signal.sigwait(ends)
    except (StorageError, MissingDependency) as error:
        return _refused(error)
    return 0


def _served(
    stack: ExitStack,
    url: str,
    keys: Path | None,
    units: int,
    restore: Path | None,
    durability: str,
    folder: str | None,
    memory: str | None,
    spill: Path | None,
    encrypt_bulk: bool,
) -> str:
    limit = None if memory is None else size_of(memory)
    if durability != "memory" and (units or restore is not None):
        raise StorageError(f"durability {durability!r} is for a queue without units that begins empty or from its log")
    if units:
        from asyncflow.storage.host import Host

        host = Host(url, units, restore, keys=keys, memory_limit=limit, spill=spill, encrypt_bulk=encrypt_bulk)
        return stack.enter_context(host).url
    if restore is not None:
        return stack.enter_context(TransferQueue.restore(restore, limit, spill)).serve(url, keys, encrypt_bulk)
    queue = TransferQueue.open(durability=durability, folder=folder, memory_limit=limit, spill=spill)
    return stack.enter_context(queue).serve(url, keys, encrypt_bulk)


def unit(
    queue: str,
    url: str,
    keys: Path | None = None,
    memory: str | None = None,
    spill: Path | None = None,
    encrypt_bulk: bool = False,
) -> int:
    """Be a storage unit of a queue until that ends, or until Ctrl-C or SIGTERM."""
    from asyncflow.storage.host import serve_unit

    ended = threading.Event()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGTERM})  # who starts it may have blocked them
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: ended.set())
    try:
        chosen = Spill.chosen(None if memory is None else size_of(memory), spill)
        serve_unit(queue, url, keys, ended, chosen, encrypt_bulk)
    except (StorageError, MissingDependency) as error:
        return _refused(error)
    return 0


def inspect(url: str, *, keys: Path | None, prometheus: bool, timeout: float) -> int:
    """Print how a queue stands."""
    try:
        with TransferQueue.open(url, timeout, keys) as queue:
            status = queue.status()
    except (StorageError, MissingDependency) as error:
        return _refused(error)
    sys.stdout.write(exposition(status) if prometheus else describe(url, status))
    return 0


def keys(folder: Path, client: str) -> int:
    """Write keys, and say where they go."""
    from asyncflow.storage.keys import create

    try:
        own = create(folder, client)
    except (StorageError, MissingDependency) as error:
        return _refused(error)
    sys.stdout.write(f"{folder / 'server'}: stays on the host of the queue\n{own}: goes to hosts that use the queue\n")
    return 0


def _refused(error: StorageError | MissingDependency) -> int:
    sys.stderr.write(f"{error}\n")
    return FAILED if isinstance(error, WaitTimeout | QueueClosed) else USAGE


def describe(url: str, status: QueueStatus) -> str:
    """Show tables, tasks and waits, a line each."""
    # The one who asks is a client, too.
    lines = [f"queue {url}: {status.clients - 1} other clients, {status.streams} streams"]
    if status.failed is not None:
        lines.append(f"failed: {status.failed.rstrip()}")
    if "" in status.memory:
        lines.append(f"cells: {_memory(status.memory[''])}")
    for unit, held in status.units.items():
        kept = f": {_memory(status.memory[unit])}" if unit in status.memory else ""
        lines.append(f"unit {unit}: {_size(held)}{kept}")
    for name, table in status.tables.items():
        sealed = ", sealed" if table.sealed else ""
        lines.append(f"table {name}: {table.rows} rows, {_size(table.bytes)}{_spilled(table)}{sealed}")
        lines += _table(table)
    return "\n".join(lines if status.tables else [*lines, "no tables"]) + "\n"


def _memory(kept: MemoryStatus) -> str:
    trouble = f", which cannot be written: {kept.trouble}" if kept.trouble else ""
    memory = f"{_size(kept.memory)} in memory (limit {_size(kept.limit)})"
    return f"{memory}, {_size(kept.spilled)} in {kept.folder}{trouble}"


def _spilled(table: TableStatus) -> str:
    return f" ({_size(table.spilled)} on disk)" if table.spilled else ""


def _table(table: TableStatus) -> list[str]:
    width = max(map(len, table.tasks), default=0)
    tasks = [f"  task {name:{width}}  {_task(counts)}" for name, counts in table.tasks.items()]
    return tasks + [f"  {_wait(wait)}" for wait in table.waits]


def _task(counts: TaskCounts) -> str:
    oldest = "" if counts.oldest_lease is None else f" (oldest {_age(counts.oldest_lease)})"
    return f"{counts.waiting} ready, {counts.leased} leased{oldest}, {counts.done} done, {counts.blocked} blocked"


def _wait(wait: Wait) -> str:
    who = wait.consumer or f"client {wait.client}"
    role = "a put" if wait.task is None else f"task {wait.task}"
    lacking = f"; blocked rows lack {', '.join(wait.missing)}" if wait.missing else ""
    return f"{who} ({role}) waits for {wait.wanted} since {_age(wait.seconds)}{lacking}"


def _age(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 60 else f"{int(seconds) // 60} min {int(seconds) % 60} s"


def _size(amount: float) -> str:
    for unit in ("bytes", "KB", "MB", "GB"):
        if amount < 1000 or unit == "GB":
            break
        amount /= 1000
    return f"{amount:.0f} {unit}" if unit == "bytes" else f"{amount:.1f} {unit}"
