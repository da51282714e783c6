"""One queue, reached in each of the ways there are: the same tests hold over all of them."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from asyncflow.storage import Schema, TransferQueue
from asyncflow.storage.client import Table
from asyncflow.storage.controller import Controller
from asyncflow.storage.depot import Depot
from asyncflow.storage.link import EmbeddedLink
from asyncflow.storage.spill import Spill
from asyncflow.storage.units import Units

COLUMNS = {"tokens": "list<int64>", "text": "string", "score": "float32", "blob": "bytes"}


@pytest.fixture
def address(tmp_path: Path) -> str:
    return f"ipc://{tmp_path}/queue"


@pytest.fixture
def spill() -> Callable[[], Spill | None]:
    """Makes what each process that holds cells keeps a limit of memory by; none, unless a module says otherwise."""
    return lambda: None


@pytest.fixture(params=["embedded", "ipc", "tcp", "units"])
def clients(
    request: pytest.FixtureRequest, address: str, spill: Callable[[], Spill | None]
) -> Iterator[Callable[[], TransferQueue]]:
    """Opens clients of one queue; embedded, they are all the queue itself."""
    units = request.param == "units"
    controller = Controller(units=Units()) if units else Controller(spill=spill())
    host = TransferQueue(EmbeddedLink(controller))
    opened: list[TransferQueue | Depot] = [host]
    url = {"ipc": address, "tcp": "tcp://127.0.0.1:*", "units": address}.get(request.param)
    served = host.serve(url) if url else ""
    opened += [Depot(served, f"{address}.{number}", 30, spill=spill()) for number in range(2 * units)]

    def client() -> TransferQueue:
        if not served:
            return host
        opened.append(queue := TransferQueue.open(served, timeout=30))
        return queue

    yield client
    for each in reversed(opened):
        each.close()


@pytest.fixture
def queue(clients: Callable[[], TransferQueue]) -> TransferQueue:
    return clients()


@pytest.fixture
def table(queue: TransferQueue) -> Table:
    return queue.create_table("train", Schema(COLUMNS))


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as threads:
        yield threads
