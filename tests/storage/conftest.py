"""One queue, reached in each of the ways there are: the same tests hold over all of them."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from asyncflow.storage import Schema, TransferQueue
from asyncflow.storage.client import Table

COLUMNS = {"tokens": "list<int64>", "text": "string", "score": "float32", "blob": "bytes"}


@pytest.fixture
def address(tmp_path: Path) -> str:
    return f"ipc://{tmp_path}/queue"


@pytest.fixture(params=["embedded", "ipc", "tcp"])
def clients(request: pytest.FixtureRequest, address: str) -> Iterator[Callable[[], TransferQueue]]:
    """Opens clients of one queue; embedded, they are all the queue itself."""
    host = TransferQueue.open("embedded://")
    opened = [host]
    url = {"ipc": address, "tcp": "tcp://127.0.0.1:*"}.get(request.param)
    served = host.serve(url) if url else ""

    def client() -> TransferQueue:
        if not served:
            return host
        opened.append(TransferQueue.open(served, timeout=30))
        return opened[-1]

    yield client
    for queue in reversed(opened):
        queue.close()


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
