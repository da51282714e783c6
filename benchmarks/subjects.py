"""Who is measured: a warm copy, a bare socket, our queue in this process and served by another, and the peer.

Each does the work of one round and returns seconds for each repetition, by operation.
"""

import itertools
import json
import select
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any, Protocol

import numpy as np
import zmq

from asyncflow.storage import Batch, Schema, TransferQueue, bulk
from asyncflow.storage.batch import Column
from asyncflow.storage.client import Table
from benchmarks.rows import Case, Rows

Times = dict[str, list[float]]
TASKS = 8
ROOT = Path(__file__).parent.parent
PEER_START = 400.0
PEER_ANSWER = 240.0
PAUSE = 0.005


class Subject(Protocol):
    """One of those who are measured; what it cannot do it answers with nothing."""

    name: str

    def batches(self, case: Case, repeat: int) -> Times:
        """Put and get the rows of a case."""

    def stream(self, rows: int, number: int) -> float:
        """Rows a second from one process to another in batches of `rows`; 0 if there is no such thing."""

    def latency(self, number: int) -> list[float]:
        """Seconds from the put of one row to its delivery, through an idle queue."""

    def placed(self, rows: int, repeat: int) -> list[float]:
        """Seconds to make room for rows of 1 MiB and to put them once they are written there."""

    def held(self, rows: int, batch: int, repeat: int) -> list[float]:
        """Seconds for a batch of small rows to go through eight tasks while so many rows are held."""


def timed(work: Callable[[], object]) -> float:
    """Seconds of a call."""
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


class Copy:
    """numpy's copy of the same buffers into warm memory."""

    name = "memcpy"

    def batches(self, case: Case, repeat: int) -> Times:
        """Copy everything once."""
        sources = _buffers(case.rows())
        targets = [np.zeros_like(source) for source in sources]

        def copy() -> None:
            for target, source in zip(targets, sources, strict=True):
                np.copyto(target, source)

        copy()
        return {"copy": [timed(copy) for _ in range(repeat)]}

    def stream(self, rows: int, number: int) -> float:
        """Nothing."""
        return 0.0

    def latency(self, number: int) -> list[float]:
        """Nothing."""
        return []

    def placed(self, rows: int, repeat: int) -> list[float]:
        """Nothing."""
        return []

    def held(self, rows: int, batch: int, repeat: int) -> list[float]:
        """Nothing."""
        return []


class Wire(Copy):
    """One multipart message over ipc to another process, a frame a buffer, answered by an empty one."""

    name = "pyzmq"

    def batches(self, case: Case, repeat: int) -> Times:
        """Send everything once and wait for the answer."""
        frames = [source.view(np.uint8).data for source in _buffers(case.rows())]
        with self._echo() as socket:

            def trip() -> None:
                socket.send_multipart(frames, copy=False)
                socket.recv()

            trip()
            return {"transfer": [timed(trip) for _ in range(repeat)]}

    def latency(self, number: int) -> list[float]:
        """Round trips of an empty message, with the pauses of the others."""
        with self._echo() as socket:
            times = []
            for _ in range(number):
                time.sleep(PAUSE)
                times.append(timed(lambda: (socket.send(b""), socket.recv())))
            return times

    @contextmanager
    def _echo(self) -> Iterator["zmq.Socket[bytes]"]:
        with tempfile.TemporaryDirectory() as folder, child("echo", f"ipc://{folder}/echo") as process:
            with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
                socket.setsockopt(zmq.LINGER, 0)
                socket.setsockopt(zmq.RCVTIMEO, 60_000)
                socket.connect(f"ipc://{folder}/echo")
                yield socket
            process.terminate()


class Embedded:
    """Our queue in this process."""

    name = "embedded"

    @contextmanager
    def _queue(self) -> Iterator[TransferQueue]:
        with TransferQueue.open() as queue:
            yield queue

    def batches(self, case: Case, repeat: int) -> Times:
        """Put a batch; get it with its lease and acknowledge it, which frees it."""
        batch, times = arrow(case.rows()), Times(put=[], get=[])
        with self._queue() as queue:
            table = _table(queue, batch)
            with table.stream("get", rows=len(batch)) as stream:
                for number in range(repeat + 1):
                    put = timed(lambda: table.put(batch))
                    started = time.perf_counter()
                    lease = _some(stream.next())
                    lease.done()
                    get = time.perf_counter() - started
                    if number == 0:  # warms up, and is the one that is compared
                        assert lease.batch.select(batch.names).equals(batch)
                    else:
                        times["put"].append(put)
                        times["get"].append(get)
        return times

    def stream(self, rows: int, number: int) -> float:
        """Nothing: there is one process only."""
        return 0.0

    def latency(self, number: int) -> list[float]:
        """One row to a thread that waits for it."""
        arrived: list[float] = []
        with self._queue() as queue:
            table = _table(queue, arrow(Case("", "tokens", 1).rows()))
            thread = Thread(target=lambda: arrived.extend(consume(table, number)))
            thread.start()
            began = trickle(table, number)
            thread.join()
        return [after - before for before, after in zip(began, arrived, strict=True)]

    def placed(self, rows: int, repeat: int) -> list[float]:
        """Put what was written into the queue's own memory; what it takes to write it is not counted."""
        batch = arrow(Case("", "blobs", rows).rows())
        lengths, times = batch["blob"].lengths, []
        with self._queue() as queue:
            table = _table(queue, batch)
            with table.stream("get", rows=rows) as stream:
                for number in range(repeat + 1):
                    started = time.perf_counter()
                    room = table.room({"blob": lengths})
                    made = time.perf_counter() - started
                    np.copyto(room["blob"], batch["blob"].values)
                    times.append(made + timed(partial(table.put, room.batch())))
                    lease = _some(stream.next())
                    if number == 0:
                        assert lease.batch.select(batch.names).equals(batch)
                    lease.done()
                    del room, lease
        return times[1:]

    def held(self, rows: int, batch: int, repeat: int) -> list[float]:
        """Put a batch, and let each task have the oldest one."""
        with self._queue() as queue:
            table = queue.create_table("held", Schema({"x": "int64"}))
            names = [f"task {number}" for number in range(TASKS)]
            for name in names:
                table.task(name, reads=("x",))
            for start, stop in itertools.pairwise([*range(0, rows, 10_000), rows]):
                table.put({"x": np.arange(start, stop)})
            streams = [table.stream(name, rows=batch) for name in names]
            piece = {"x": np.arange(batch)}

            def through() -> None:
                table.put(piece)
                for stream in streams:
                    _some(stream.next()).done()

            through()
            return [timed(through) for _ in range(repeat)]


class Served(Embedded):
    """Our queue in a process of its own, reached over ipc."""

    name = "ipc"

    @contextmanager
    def _queue(self) -> Iterator[TransferQueue]:
        with tempfile.TemporaryDirectory() as folder, child("serve", f"ipc://{folder}/queue") as process:
            with TransferQueue.open(f"ipc://{folder}/queue") as queue:
                yield queue
            process.terminate()

    def stream(self, rows: int, number: int) -> float:
        """Batches from a process that puts to this one."""
        batch = arrow(Case("", "tokens", rows).rows())
        with self._queue() as queue:
            table = _table(queue, batch)
            with child("produce", queue.url, str(rows), str(number)) as process, table.stream("get", rows) as stream:
                _some(stream.next()).done()
                started = time.perf_counter()
                for _ in range(number - 1):
                    _some(stream.next()).done()
                seconds = time.perf_counter() - started
                process.wait(60)
        return rows * (number - 1) / seconds

    def latency(self, number: int) -> list[float]:
        """One row to another process that waits for it; clocks of processes of one host agree."""
        with self._queue() as queue:
            table = _table(queue, arrow(Case("", "tokens", 1).rows()))
            with child("consume", queue.url, str(number)) as process:
                began = trickle(table, number)
                assert process.stdout is not None
                arrived = json.loads(process.stdout.readline())
                process.wait(60)
        return [after - before for before, after in zip(began, arrived, strict=True)]


class Peer:
    """The public `transferqueue`, asked line by line."""

    name = "transferqueue"

    def __init__(self, python: str) -> None:
        self._process = subprocess.Popen(
            [python, "-m", "benchmarks.peer"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=ROOT,
        )
        self.versions: dict[str, str] = self._answer(PEER_START)

    def ask(self, do: str, **arguments: object) -> Any:
        """Have the worker do something, and return its answer."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": do, **arguments}).encode() + b"\n")
        self._process.stdin.flush()
        return self._answer(PEER_ANSWER)

    def _answer(self, timeout: float) -> Any:
        assert self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], timeout)
        line = self._process.stdout.readline() if ready else b""
        if not line:
            raise ChildProcessError("transferqueue ended, or did not answer in time: run benchmarks.peer by itself")
        return json.loads(line)

    def batches(self, case: Case, repeat: int) -> Times:
        """Put a batch; get its metadata and data."""
        return self.ask("batches", kind=case.kind, rows=case.count, repeat=max(1, repeat // 4))

    def stream(self, rows: int, number: int) -> float:
        """Batches from another process to the worker."""
        return self.ask("stream", rows=rows, number=max(2, number // 20))

    def latency(self, number: int) -> list[float]:
        """One row to a client that polls every millisecond."""
        return self.ask("latency", number=max(1, number // 8))

    def placed(self, rows: int, repeat: int) -> list[float]:
        """Nothing: it has no such thing."""
        return []

    def held(self, rows: int, batch: int, repeat: int) -> list[float]:
        """A batch through eight tasks."""
        return self.ask("held", rows=rows, batch=batch, repeat=1)

    def close(self) -> None:
        """Let the worker end its cluster."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()


# What other processes do


@contextmanager
def child(do: str, *arguments: str) -> "Iterator[subprocess.Popen[str]]":
    """Run one of the functions below in a process of its own, which says when it is ready."""
    with told(do, *arguments) as (process, _):
        yield process


@contextmanager
def told(do: str, *arguments: str) -> "Iterator[tuple[subprocess.Popen[str], str]]":
    """Run one of the functions below in a process of its own, and return what it says first, too."""
    command = [sys.executable, "-m", "benchmarks.subjects", do, *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        assert process.stdout is not None
        said = process.stdout.readline().strip()
        try:
            yield process, said
        finally:
            process.kill()


def ready() -> None:
    """Tell the parent that it may go on."""
    print("ready", flush=True)


def serve(url: str) -> None:
    """Serve an empty queue until killed."""
    with TransferQueue.open() as queue:
        queue.serve(url)
        ready()
        while True:
            time.sleep(3600)


def serve_tcp(limit: str) -> None:
    """Serve an empty queue at a port of loopback, and tell the address; use bulk connections above a limit."""
    bulk.LARGE = int(limit)
    with TransferQueue.open() as queue:
        print(queue.serve("tcp://127.0.0.1:*"), flush=True)
        while True:
            time.sleep(3600)


def sink() -> None:
    """Take and give so many bytes over a plain connection, from and to warm memory, and tell its port."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        print(listener.getsockname()[1], flush=True)
        connection, _ = listener.accept()
        memory = np.zeros(0, np.uint8)
        while said := connection.recv(9, socket.MSG_WAITALL):
            size = int.from_bytes(said[1:], "little")
            memory = memory if memory.size == size else np.ones(size, np.uint8)
            if said[:1] == b"<":
                connection.sendall(memory)
            else:
                fill(connection, memory)
                connection.sendall(b"!")


def fill(connection: socket.socket, memory: "np.ndarray[Any, Any]") -> None:
    """Receive as many bytes as there is room for."""
    left = memoryview(memory).cast("B")
    while left:
        left = left[connection.recv_into(left) :]


def echo(url: str) -> None:
    """Answer each message with an empty one."""
    with zmq.Context() as context, context.socket(zmq.ROUTER) as socket:
        socket.bind(url)
        ready()
        while True:
            name, *_ = socket.recv_multipart(copy=False)
            socket.send_multipart([name, b""])


def produce(url: str, rows: str, number: str) -> None:
    """Put batches one after another, so many or, where that is 0, for ever."""
    batch = arrow(Case("", "tokens", int(rows)).rows())
    with TransferQueue.open(url) as queue:
        table = queue.table("rows")
        ready()
        for _ in range(int(number)) if int(number) else itertools.repeat(None):
            table.put(batch)


def consume(table: Table, number: int) -> list[float]:
    """Take rows one by one and return when each was there."""
    arrived = []
    with table.stream("get", rows=1) as stream:
        for _ in range(number):
            lease = _some(stream.next())
            arrived.append(time.perf_counter())
            lease.done()
    return arrived


def consume_elsewhere(url: str, number: str) -> None:
    """Consume rows of a queue and print when each was there."""
    with TransferQueue.open(url) as queue:
        ready()
        print(json.dumps(consume(queue.table("rows"), int(number))), flush=True)


def trickle(table: Table, number: int) -> list[float]:
    """Put rows one by one into an idle queue and return when each put began."""
    batch, began = arrow(Case("", "tokens", 1).rows()), []
    time.sleep(20 * PAUSE)
    for count in range(number):
        time.sleep(PAUSE)
        began.append(time.perf_counter())
        table.put(batch)
        deadline = time.monotonic() + 60
        while table.ledger().done <= count and time.monotonic() < deadline:
            time.sleep(PAUSE)
    return began


# Rows


def arrow(rows: Rows) -> Batch:
    """Return rows as our users hold them."""
    return Batch({name: _column(values, bounds) for name, (values, bounds) in rows.items()})


def _column(values: Any, bounds: Any) -> Column:
    return Column.infer(values) if bounds is None else Column.ragged(values, bounds, f"list<{values.dtype.name}>")


def _buffers(rows: Rows) -> Sequence[np.ndarray[Any, Any]]:
    return [array for column in rows.values() for array in column if array is not None]


def _table(queue: TransferQueue, batch: Batch) -> Table:
    table = queue.create_table("rows", batch.schema)
    table.task("get", reads=batch.names)
    return table


def _some(lease: Any) -> Any:
    assert lease is not None
    return lease


CHILDREN: dict[str, Callable[..., None]] = {
    "serve": serve,
    "serve_tcp": serve_tcp,
    "sink": sink,
    "echo": echo,
    "produce": produce,
    "consume": consume_elsewhere,
}

if __name__ == "__main__":
    CHILDREN[sys.argv[1]](*sys.argv[2:])
