"""Clients whose process does what disturbs those who wait: handlers of signals, forks, the collector."""

import gc
import os
import signal
import subprocess
import sys
from threading import Thread, Timer

import pytest

from asyncflow.errors import QueueClosed, StorageError, WaitTimeout
from asyncflow.storage import Schema, TransferQueue


@pytest.fixture
def client(address):
    with TransferQueue.open() as host:
        host.serve(address)
        with TransferQueue.open(address) as queue:
            table = queue.create_table("t", Schema({"x": "int64"}))
            table.task("use", ("x",))
            yield queue, table


@pytest.fixture
def alarm():
    """Has something called in the main thread, a moment from now."""

    def begin(call):
        signal.signal(signal.SIGALRM, lambda *_: call())
        signal.setitimer(signal.ITIMER_REAL, 0.3)

    before = signal.getsignal(signal.SIGALRM)
    yield begin
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def test_a_queue_that_nobody_closed_is_collected(client):
    queue, _ = client
    code = """
import gc, sys
from asyncflow.storage import TransferQueue
TransferQueue.open(sys.argv[1]).status()
gc.collect()
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", code, queue.url], check=True, timeout=60)
    gc.collect()


@pytest.mark.parametrize("timeout", [1e7, 1e10, float("inf")])
def test_a_wait_may_be_as_long_as_one_likes(client, timeout):
    _, table = client
    Timer(0.2, table.put, [{"x": [1, 2]}]).start()
    found = []
    streams = [table.stream("use", rows=1) for _ in range(2)]
    waits = [Thread(target=lambda stream=stream: found.append(stream.next(timeout))) for stream in streams]
    for wait in waits:
        wait.start()
    for wait in waits:
        wait.join(20)
    assert len(found) == 2


def test_a_handler_may_close_the_queue_that_it_interrupts(client, alarm):
    queue, table = client
    stream = table.stream("use", rows=1)
    alarm(queue.close)
    with pytest.raises(QueueClosed):
        stream.next(timeout=20)


def test_a_handler_may_bring_what_it_interrupts_the_wait_for(client, alarm):
    _, table = client
    stream = table.stream("use", rows=1)
    alarm(lambda: table.put({"x": [1]}))
    assert stream.next(timeout=20).batch["x"].array.tolist() == [1]


def test_a_batch_comes_to_the_next_call_where_a_handler_ended_the_wait(client, alarm):
    def interrupt():
        raise KeyboardInterrupt

    _, table = client
    stream = table.stream("use", rows=1)
    alarm(interrupt)
    with pytest.raises(KeyboardInterrupt):
        stream.next(timeout=20)
    table.put({"x": [1]})
    assert len(stream.next(timeout=20)) == 1
    with pytest.raises(WaitTimeout):
        stream.next(timeout=0.01)


def test_a_fork_reads_no_answers_of_its_parent(client):
    _, table = client
    pending = table.send_put({"x": [1]})
    if (child := os.fork()) == 0:
        try:
            pending.result(5)
        except StorageError as error:
            os._exit(7 if "forked" in str(error) else 1)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    pending.result(20)
    assert len(table.find()) == 1
