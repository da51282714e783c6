"""Producers, consumers and the holder of a queue, killed in the middle of what they do.

A process works without a pause and is killed at moments that a seed chooses, several in each test, so that other
points are hit. Nothing here waits for a time to pass: a moment is a number of things done, and a little more.
"""

import gc
import re
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest

from asyncflow.errors import LeaseLost, StorageError, WaitTimeout
from asyncflow.storage import Schema, TransferQueue, arena
from asyncflow.storage.client import Lease, Table
from tests.storage import mortals
from tests.storage.mortals import LARGE, PATIENCE, WIDTH, Mortal, Nursery

ROUNDS = 4
ROWS = 120


@pytest.fixture(scope="module")
def nursery(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nursery]:
    yield from mortals.nursery(tmp_path_factory.mktemp("nursery"))


@pytest.fixture
def host(address: str) -> Iterator[TransferQueue]:
    with TransferQueue.open() as queue:
        queue.serve(address)
        yield queue


def kill(mortal: Mortal, random: np.random.Generator, most: int = 12) -> list[Any]:
    """Kill a process some time after it has done a few things; return all that it told of."""
    said = [mortal.hear() for _ in range(random.integers(0, most))]
    time.sleep(random.uniform(0, 0.004))
    mortal.kill()
    return said + mortal.rest()


def whole(table: Table) -> list[int]:
    """Return the numbers of all rows, whose cells are complete and their own."""
    rows = table.find().rows
    batch = table.read(rows, ["x", "cells"])
    assert np.array_equal(batch["cells"].lengths, np.full(len(rows), LARGE))
    assert np.array_equal(batch["cells"].values.reshape(-1, LARGE), np.repeat(batch["x"].array[:, None], LARGE, 1))
    numbers: list[int] = batch["x"].array.tolist()
    return numbers


def fill(table: Table) -> None:
    for start in range(0, ROWS, WIDTH):
        table.put(mortals.columns(start))


def drain(table: Table) -> dict[int, int]:
    """Use all rows that are left, and return how often each had been leased."""
    found = {}
    with table.stream("use", partial=True) as stream:
        while (lease := stream.next(PATIENCE)) is not None:
            found |= dict.fromkeys(lease.rows.tolist(), lease.attempt)
            table.write(lease.rows, {"twice": 2 * lease.batch["x"].array}, lease)
            lease.done()
    return found


def at_base(queue: TransferQueue) -> bool:
    """Whether nothing is left of clients, rows and the memory that they had."""
    gc.collect()
    # A writer leaves its empty segments when it needs another one.
    other = queue.create_table("other", Schema({"large": "list<int64>"}))
    other.drop(other.put({"large": [np.arange(300_000)]}), "end")
    status = queue.status()
    held = sum(table.bytes for table in status.tables.values())
    used: int = queue._link._arena.used  # type: ignore[attr-defined]
    return (status.clients, status.streams, held) == (0, 0, 0) and used <= 8 << 20


def test_a_killed_producer_leaves_whole_puts(host: TransferQueue, address: str, nursery: Nursery) -> None:
    random = np.random.default_rng(0)
    table = mortals.begin(host)
    for _ in range(ROUNDS):
        before = table.ledger().admitted
        told = kill(nursery.start(mortals.produce, url=address), random)
        mortals.until(lambda: host.status().clients == 0)
        numbers = whole(table)
        # What was told is there; of the put that was under way all is, or nothing.
        assert len(numbers) // WIDTH - len(told) in (0, 1)
        assert numbers == list(range(len(numbers)))
        assert len(numbers) % WIDTH == 0
        assert table.ledger().admitted - before == table.ledger().live == len(numbers)
        table.drop(table.find().rows, "end")
        mortals.until(lambda: at_base(host))


def test_what_a_killed_consumer_holds_comes_again(host: TransferQueue, address: str, nursery: Nursery) -> None:
    random = np.random.default_rng(1)
    table = mortals.begin(host)
    fill(table)
    leases = []
    for _ in range(ROUNDS):
        leases += kill(nursery.start(mortals.get, url=address), random)
        mortals.until(lambda: host.status().clients == 0)
        assert table.status().tasks["use"].waiting == ROWS
    for lease in leases:
        with pytest.raises(LeaseLost):
            table.adopt(lease, [0]).done()
    table.seal()
    attempts = drain(table)
    assert sorted(attempts) == list(range(ROWS))
    assert table.ledger().done == ROWS
    assert max(attempts.values()) > 1 or not leases
    mortals.until(lambda: at_base(host))


def test_what_a_killed_consumer_was_through_with_comes_never_again(
    host: TransferQueue, address: str, nursery: Nursery
) -> None:
    random = np.random.default_rng(2)
    table = mortals.begin(host)
    table.task("look", reads=("x", "twice"))
    told: list[int] = []
    for kills in range(1, ROUNDS + 1):
        fill(table)  # enough for each, also if it gets through with all of them before it is killed
        told += [row for rows in kill(nursery.start(mortals.ack, url=address), random) for row in rows]
        mortals.until(lambda: host.status().clients == 0)
        done = ROWS * kills - table.status().tasks["use"].waiting
        # Of each one that was killed, an acknowledgement may have come that it did not live to tell.
        assert 0 <= done - len(told) <= 2 * kills
    table.seal()
    again = drain(table)
    assert len(set(told)) == len(told)
    assert not set(told) & set(again)
    assert table.status().tasks["use"].done == ROWS * ROUNDS
    with table.stream("look") as stream:
        lease = stream.next()
        assert lease is not None
        assert np.array_equal(lease.batch["twice"].array, 2 * lease.batch["x"].array)
        assert len(lease) == ROWS * ROUNDS
        lease.done()
        del lease
    assert table.ledger().done == ROWS * ROUNDS
    mortals.until(lambda: at_base(host))


def test_the_queue_goes_on_when_who_asked_for_a_snapshot_is_killed(
    host: TransferQueue, address: str, nursery: Nursery, tmp_path: Path
) -> None:
    random = np.random.default_rng(3)
    table = mortals.begin(host)
    folder = tmp_path / "saved"
    for count in range(1, ROUNDS + 1):
        table.put(mortals.columns((count - 1) * WIDTH))
        kill(nursery.start(mortals.save, url=address, folder=str(folder)), random, most=4)
        host.snapshot(folder)
        with TransferQueue.restore(folder) as back:
            assert len(whole(back.table("t"))) == count * WIDTH
    table.drop(table.find().rows, "end")
    mortals.until(lambda: at_base(host))


# The holder of the queue is killed, and clients of this process notice.


def puts(queue: TransferQueue, folder: Path) -> Iterator[int]:
    table = queue.table("t")
    for number in range(10**9):
        table.put(mortals.columns(number * WIDTH), timeout=PATIENCE)
        yield number + 1


def gets(queue: TransferQueue, folder: Path) -> Iterator[Lease | None]:
    stream = queue.table("t").stream("use", rows=WIDTH, credit=3)
    while True:
        yield stream.next(PATIENCE)


def acks(queue: TransferQueue, folder: Path) -> Iterator[int]:
    for lease in queue.table("t").stream("use", rows=WIDTH):
        lease.done()
        yield len(lease)


def saves(queue: TransferQueue, folder: Path) -> Iterator[int]:
    # The last snapshot that is told of may be the one before that in the folder.
    while True:
        rows = queue.table("t").ledger().admitted
        queue.snapshot(folder, PATIENCE)
        yield rows


Work = Callable[[TransferQueue, Path], Iterator[Any]]


def worked(work: Work, url: str, folder: Path, told: "SimpleQueue[Any]") -> StorageError | None:
    """Work until an error; return it."""
    with closing(TransferQueue.open(url, PATIENCE)) as queue:
        try:
            for each in work(queue, folder):
                told.put(each)
        except StorageError as error:
            return error
    return None


def segments(mortal: Mortal) -> set[Path]:
    """Return the files in shared memory that a process has mapped."""
    maps = Path(f"/proc/{mortal.pid}/maps").read_text()
    return {Path(found) for found in re.findall(r"/dev/shm/asyncflow-[0-9a-f]{16}-\d+", maps)}


def swept(files: set[Path]) -> bool:
    """Whether files of a process that was killed are gone; its lock may end a little after its sockets do."""
    arena.sweep()
    return not any(path.exists() for path in files)


@pytest.mark.parametrize("work", [puts, gets, acks, saves])
def test_every_client_of_a_killed_holder_gets_a_typed_error(
    pool: ThreadPoolExecutor, address: str, nursery: Nursery, tmp_path: Path, work: Work
) -> None:
    random = np.random.default_rng(2)
    for turn in range(2):
        url, folder, told = f"{address}{turn}", tmp_path / f"saved{turn}", SimpleQueue[Any]()
        mortal = nursery.start(mortals.hold, url=url)
        mortal.hear()
        others = SimpleQueue[Any]()
        clients = [pool.submit(worked, puts, url, folder, others), pool.submit(worked, work, url, folder, told)]
        others.get(timeout=PATIENCE)
        for _ in range(1 + random.integers(0, 8)):
            told.get(timeout=PATIENCE)
        time.sleep(random.uniform(0, 0.004))
        files = segments(mortal)
        mortal.kill()
        assert mortal.rest() == []
        errors = [client.result(PATIENCE) for client in clients]
        assert all(isinstance(error, StorageError) and url in str(error) for error in errors), errors
        mortals.until(lambda files=files: swept(files))
        if work is saves:
            old = [told.get() for _ in range(told.qsize())]
            with TransferQueue.restore(folder) as back:
                numbers = whole(back.table("t"))
                assert numbers == list(range(len(numbers)))
                assert len(numbers) >= max(old, default=0)


def test_a_client_that_comes_later_is_told_that_nobody_is_there(address: str, nursery: Nursery) -> None:
    mortal = nursery.start(mortals.hold, url=address)
    mortal.hear()
    mortal.kill()
    mortal.rest()
    with pytest.raises(WaitTimeout, match="nobody answers"):
        TransferQueue.open(address, timeout=0.2)
    with TransferQueue.open() as queue:  # what a killed holder leaves at an address is in nobody's way
        assert queue.serve(address) == address
