"""Clients without a thread of their own: who waits reads for all."""

import gc
import os
import random
import re
import signal
import threading
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from asyncflow.errors import QueueClosed, StorageError, WaitTimeout
from asyncflow.storage import Schema, TransferQueue
from asyncflow.storage.remote import RemoteLink


@pytest.fixture
def host(address: str) -> Iterator[TransferQueue]:
    with TransferQueue.open() as queue:
        queue.serve(address)
        queue.create_table("t", Schema({"x": "int64"})).task("use", reads=("x",), max_attempts=10**6)
        yield queue


@pytest.fixture
def client(host: TransferQueue, address: str) -> Iterator[TransferQueue]:
    with TransferQueue.open(address, 30) as queue:
        yield queue


def readers() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "asyncflow-client"]


def test_a_client_that_waits_needs_no_thread(client: TransferQueue) -> None:
    table = client.table("t")
    table.put({"x": [1, 2]})
    with table.stream("use", rows=2, credit=4) as stream:
        lease = stream.next()
        assert lease is not None
        lease.done()
    assert readers() == []


def test_many_threads_with_short_and_long_waits_share_one_connection(client: TransferQueue) -> None:
    table, count, width = client.table("t"), 12, 25
    found: list[int] = []

    def consume(seed: int) -> None:
        draw, stream = random.Random(seed), table.stream("use", rows=1)
        while True:
            try:
                lease = stream.next(draw.choice([0.0005, 0.005, 30]))
            except WaitTimeout:
                continue
            if lease is None:
                return
            found.extend(lease.batch["x"].array.tolist())
            lease.done()

    with ThreadPoolExecutor(2 * count) as threads:
        consumers = [threads.submit(consume, seed) for seed in range(count)]
        puts = [threads.submit(table.put, {"x": np.arange(n, n + width)}) for n in range(0, count * width, width)]
        for each in puts:
            each.result(60)
        table.seal()
        for each in consumers:
            each.result(60)
    assert sorted(found) == list(range(count * width))
    assert table.ledger().done == count * width


def test_one_that_begins_to_wait_in_asyncio_style_goes_on_for_those_that_read_themselves(
    client: TransferQueue,
) -> None:
    table, told = client.table("t"), threading.Event()
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(table.stream("use", rows=1).next)
        pending = table.stream("use", rows=1).ask()
        pending.then(told.set)
        table.put({"x": [1, 2]})
        assert told.wait(30)
        assert waiting.result(30) is not None
    assert len(readers()) == 1


def test_an_idle_client_learns_of_the_end_with_its_next_call(host: TransferQueue, address: str) -> None:
    client = TransferQueue.open(address, 30)
    host.close()
    with pytest.raises(QueueClosed):
        client.status()
    with pytest.raises(QueueClosed):
        client.status()
    client.close()


def test_a_close_ends_the_waits_of_other_threads(client: TransferQueue) -> None:
    streams = [client.table("t").stream("use", rows=1) for _ in range(4)]
    with ThreadPoolExecutor(4) as threads:
        waits = [threads.submit(stream.next) for stream in streams]
        time.sleep(0.05)
        client.close()
        assert all(isinstance(wait.exception(30), QueueClosed) for wait in waits)


def test_who_calls_while_the_client_is_closed_is_told_so(host: TransferQueue, address: str) -> None:
    def call(client: TransferQueue) -> BaseException:
        try:
            while True:
                client.status()
        except StorageError as error:
            return error

    with ThreadPoolExecutor(4) as threads:
        for _ in range(10):
            client = TransferQueue.open(address, 30)
            calls = [threads.submit(call, client) for _ in range(4)]
            client.close()
            assert {type(each.result(30)) for each in calls} == {QueueClosed}


def test_a_client_that_is_forgotten_leaves(host: TransferQueue, address: str) -> None:
    client = TransferQueue.open(address, 30)
    link = weakref.ref(client._link)
    assert host.status().clients == 1
    del client
    gc.collect()
    assert link() is None
    deadline = time.monotonic() + 30
    while host.status().clients:
        assert time.monotonic() < deadline
        time.sleep(0.005)


class Alarm(Exception):
    """What a signal's handler raises."""


def alarmed(number: int, frame: object) -> None:
    raise Alarm


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_interrupts_end_a_call_or_the_connection_but_mix_nothing_up(host: TransferQueue, address: str) -> None:
    before = signal.signal(signal.SIGUSR1, alarmed)
    draw, rounds, calls = random.Random(0), 40, 0
    reasons: set[str] = set()
    try:
        client = TransferQueue.open(address, 30)
        for _ in range(rounds):
            timer = threading.Timer(draw.uniform(0.0005, 0.15), os.kill, (os.getpid(), signal.SIGUSR1))
            timer.start()
            try:
                end = time.monotonic() + 5  # what is raised in a destructor is lost
                while time.monotonic() < end:
                    table = client.table("t")
                    rows = table.put({"x": [calls]})
                    assert table.read(rows, ["x"])["x"].array.tolist() == [calls]
                    calls += 1
            except Alarm:
                continue
            except StorageError as error:
                reasons.add(re.sub(r"ipc:\S+|tcp:\S+", "URL", str(error)))
                client._link.close()
                client = TransferQueue.open(address, 30)
            finally:
                timer.join()
        client.close()
    except Alarm:  # one that came late
        client.close()
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert calls > 0
    assert reasons <= {"the connection to the queue at URL was ended by an interrupt in the middle of a message"}
    assert host.table("t").ledger().admitted >= calls


def test_a_link_that_was_ended_says_so(client: TransferQueue) -> None:
    link = client._link
    assert isinstance(link, RemoteLink)
    assert link.ended is None
    client.close()
    assert isinstance(link.ended, QueueClosed)
