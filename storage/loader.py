"""The batches of a task for a training loop: a plain iterator, or the data set of a torch DataLoader.

A lease is acknowledged by the process that consumes its batch, after it has: when the body of the loop is
through and the next batch is asked for. So each row comes at least once, and again only where the loop was
left within its batch, a process died, or the lease ran out. The workers of a DataLoader hold the leases and
do the work on a batch (`make`). What they have fetched ahead is under lease too: `lease_seconds` of the task
must be more than the time of `prefetch_factor` + 1 batches of each worker.

The end of data reaches a worker when no other one holds rows that might come back, so after the loop has
consumed what is under way. A worker that has nothing meanwhile says so: a DataLoader that takes batches in
the order of its workers would else wait for it for ever, and one that is left could not stop it.
"""

import os
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

from asyncflow.errors import QueueClosed, QueueFailed, StorageError, WaitTimeout
from asyncflow.storage import wire
from asyncflow.storage.batch import Batch
from asyncflow.storage.client import TIMEOUT, Lease, Stream, TransferQueue

if TYPE_CHECKING:
    from torch.utils.data import IterableDataset

# How long a worker waits before it tells its DataLoader that it has nothing yet.
PAUSE = 1.0


class Handed(NamedTuple):
    """What a worker hands to the consumer; a tuple, so that a DataLoader can convert and pin what is in it."""

    value: Any
    """The batch, or what was made of it."""
    lease: int
    rows: bytes
    attempt: int


_NOTHING = Handed(None, 0, b"", 0)


@dataclass(frozen=True, slots=True)
class Loader:
    """The batches of a task of the queue at `url`; it can be sent to other processes.

    `rows`, `groups`, `partial` and `whole` are those of `Table.stream`. `make` turns a batch into what the loop
    gets; it runs in the workers, so that it must be a function of a module where they are not forked.
    `timeout` is how long a batch may be waited for, in seconds (WaitTimeout). `keys` and `encrypt_bulk` are those of
    `TransferQueue.open`; a relative folder is looked for where each process runs.
    """

    url: str
    table: str
    task: str
    rows: int | None = None
    groups: int | None = None
    partial: bool = False
    whole: bool = False
    make: Callable[[Batch], Any] | None = None
    timeout: float = TIMEOUT
    keys: str | os.PathLike[str] | None = None
    encrypt_bulk: bool = False

    def __post_init__(self) -> None:
        if not self.url.startswith(("ipc://", "tcp://")):
            raise StorageError(
                f"{self.url!r} is no address that a loader can open: serve the queue, at ipc:// or tcp://"
            )

    def __iter__(self) -> Iterator[Any]:
        return self.batches()

    def batches(self, workers: "Iterable[Handed] | None" = None) -> Iterator[Any]:
        """Yield batches, each acknowledged when the next one is asked for.

        `workers` is a DataLoader of `dataset`; without one, this process fetches them itself.
        """
        for value, lease in self.leases(workers):
            yield value
            lease.done()

    def leases(self, workers: "Iterable[Handed] | None" = None) -> Iterator[tuple[Any, Lease]]:
        """Yield batches with their leases, to be ended by the loop: `lease.done(step)` for a durable task.

        Leases that came from `workers` have a batch without columns.
        """
        with self.open() as queue:
            table = queue.table(self.table)
            for handed in self._handed(queue) if workers is None else workers:
                if not isinstance(handed, Handed) or not isinstance(handed.rows, bytes):
                    raise StorageError("the DataLoader of a queue needs batch_size=None: the queue forms the batches")
                if handed.rows:
                    rows = wire.unpack(handed.rows)
                    yield handed.value, table.adopt(handed.lease, rows, handed.attempt)

    def open(self) -> TransferQueue:
        """Reach the queue."""
        return TransferQueue.open(self.url, keys=self.keys, encrypt_bulk=self.encrypt_bulk)

    def dataset(self) -> "IterableDataset[Handed]":
        """Return the data set of a DataLoader with `batch_size=None`, whose batches go through `batches`."""
        return _dataset_type()(self)

    def _handed(self, queue: TransferQueue) -> Iterator[Handed]:
        stream = queue.table(self.table).stream(
            self.task, self.rows, self.groups, partial=self.partial, whole=self.whole, consumer=f"loader {os.getpid()}"
        )
        try:
            for lease in _arrivals(stream, self.timeout):
                yield _NOTHING if lease is None else self._made(lease)
        except GeneratorExit:
            # Only one who is stopped gives back what he holds: at the end of data the loop is still at it.
            # Where the queue is gone there is nothing to give back to.
            with suppress(QueueClosed, QueueFailed):
                stream.close()
            raise

    def _to_the_last(self, queue: TransferQueue) -> Iterator[Handed]:
        """Yield batches until the loop has ended all leases of this worker: with its process they would go back.

        To a stream the leases of another are rows that might come back, so the end of one without a batch is the last.
        """
        empty = False
        while not empty:
            empty = True
            for handed in self._handed(queue):
                empty = empty and handed is _NOTHING
                yield handed

    def _made(self, lease: Lease) -> Handed:
        try:
            value = lease.batch if self.make is None else self.make(lease.batch)
        except Exception:
            lease.release(failed=True)
            raise
        return Handed(value, lease.id, wire.pack(lease.rows), lease.attempt)


def _arrivals(stream: Stream, timeout: float) -> Iterator[Lease | None]:
    """Yield leases, and None where there was nothing for a while; WaitTimeout when that has been so for too long."""
    left = timeout
    while True:
        try:
            lease = stream.next(min(PAUSE, left))
        except WaitTimeout:
            # The time between two calls is the consumer's own and does not count.
            left -= PAUSE
            if left <= 0:
                raise
            yield None
            continue
        if lease is None:
            return
        left = timeout
        yield lease


@cache
def _dataset_type() -> "Callable[[Loader], IterableDataset[Handed]]":
    """Make the class when it is first wanted: it derives from one of torch's, which is not imported for others."""
    from torch.utils.data import IterableDataset, get_worker_info

    class QueueDataset(IterableDataset[Handed]):
        def __init__(self, loader: Loader) -> None:
            self._loader = loader
            self._queues: dict[int, TransferQueue] = {}

        def __iter__(self) -> Iterator[Handed]:
            # The connection outlives the iteration: with it would go the leases that the loop has not ended yet.
            if os.getpid() not in self._queues:
                queue = self._queues[os.getpid()] = self._loader.open()
                weakref.finalize(self, queue.close)
            queue = self._queues[os.getpid()]
            return self._loader._handed(queue) if get_worker_info() is None else self._loader._to_the_last(queue)

        def __reduce__(self) -> tuple[Callable[[Loader], "IterableDataset[Handed]"], tuple[Loader]]:
            return Loader.dataset, (self._loader,)

    return QueueDataset
