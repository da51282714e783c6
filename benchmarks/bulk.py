"""How fast do large batches go from host to host? Put and get over tcp without shared memory, against a bare stream.

python -m benchmarks.bulk [--rounds N] [--quick]

A producer's array goes to the server's memory (put), and from there to a consumer's array (get), all over the loopback
of this host; the bare stream is `recv_into` warm memory, over one plain connection. Each round measures everybody in
turn, so ratios are those of neighbours in time; `frames` is the queue without bulk connections.
"""

import argparse
import socket
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from rich.console import Console
from rich.table import Table

from asyncflow.storage import Batch, TransferQueue, bulk
from asyncflow.storage.arena import Window
from asyncflow.storage.client import Lease
from benchmarks import report
from benchmarks.subjects import fill, timed, told

QUESTION = "How fast do large batches go from host to host?"
Figures: TypeAlias = dict[str, dict[str, list[float]]]
"""By case and operation, then by subject: GB/s of each round."""

CASES = {"64 x 1 MiB uint8": ((64, 1 << 20), np.uint8), "256 MiB float32": ((64, 1 << 20), np.float32)}
QUICK = {"20 MiB uint8": ((20, 1 << 20), np.uint8)}
RAW = "recv_into"
LIMITS = {"bulk": bulk.LARGE, "frames": sys.maxsize}
"""How the queue sends, and above how many bytes in bulk."""


class Raw:
    """A plain connection to another process."""

    def __init__(self, data: np.ndarray[Any, Any], port: int) -> None:
        self._data, self._memory = data.reshape(-1).view(np.uint8), np.ones(data.nbytes, np.uint8)
        self._connection = socket.create_connection(("127.0.0.1", port))
        self._size = data.nbytes.to_bytes(8, "little")

    def put(self) -> None:
        """Send the array, and hear that it is there."""
        self._connection.sendall(b">" + self._size)
        self._connection.sendall(self._data)
        self._connection.recv(1)

    def get(self) -> None:
        """Receive as much."""
        self._connection.sendall(b"<" + self._size)
        fill(self._connection, self._memory)

    def free(self) -> None:
        """Nothing: memory is used again."""

    def close(self) -> None:
        """Leave."""
        self._connection.close()


class Queue:
    """A queue in another process, whose memory this one does not see."""

    def __init__(self, data: np.ndarray[Any, Any], url: str) -> None:
        self._batch = Batch({"x": data})
        with unseen():
            self._queue = TransferQueue.open(url)
        self._table = self._queue.create_table("rows", self._batch.schema)
        self._table.task("get", reads=("x",))
        self._stream = self._table.stream("get", rows=len(data))
        self._lease: Lease | None = None

    def put(self) -> None:
        """Put the batch."""
        self._table.put(self._batch)

    def get(self) -> None:
        """Get it with its lease."""
        self._lease = self._stream.next()

    def free(self) -> None:
        """Acknowledge it, which frees its memory at both ends."""
        assert self._lease is not None
        self._lease.done()
        self._lease = None

    def check(self) -> None:
        """Compare what comes with what went."""
        self.put()
        self.get()
        assert self._lease is not None
        assert self._lease.batch.select(["x"]).equals(self._batch)
        self.free()

    def close(self) -> None:
        """Leave."""
        self._queue.close()


@contextmanager
def unseen() -> Iterator[None]:
    """Let clients that are opened take no shared memory for theirs, as on another host."""
    visible = Window.visible
    Window.visible = staticmethod(lambda *_: False)  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        Window.visible = visible  # type: ignore[method-assign]


@contextmanager
def large(limit: int) -> Iterator[None]:
    """Let this process use bulk connections above a limit."""
    before, bulk.LARGE = bulk.LARGE, limit
    try:
        yield
    finally:
        bulk.LARGE = before


def measure(name: str, data: np.ndarray[Any, Any], rounds: int, note: Callable[[str], None]) -> Figures:
    """Put and get with everybody in each round; the first one warms up."""
    figures: Figures = {f"{name}, {do}": {} for do in ("put", "get")}
    with ExitStack() as stack:
        _, port = stack.enter_context(told("sink"))
        subjects: dict[str, Raw | Queue] = {RAW: Raw(data, int(port))}
        for who, limit in LIMITS.items():
            _, url = stack.enter_context(told("serve_tcp", str(limit)))
            subjects[who] = Queue(data, url)
        for each in subjects.values():
            stack.callback(each.close)
        for number in range(rounds + 1):
            note(f"{time.strftime('%H:%M:%S')} {name}: round {number} of {rounds}")
            for who, subject in subjects.items():
                with large(LIMITS.get(who, 0)):
                    if number == 0 and isinstance(subject, Queue):
                        subject.check()
                    for do, work in (("put", subject.put), ("get", subject.get)):
                        rate = data.nbytes / timed(work) / 1e9
                        if number:
                            figures[f"{name}, {do}"].setdefault(who, []).append(rate)
                    subject.free()
    return figures


def ratios(rates: dict[str, list[float]], who: str) -> list[float]:
    """Return how many times the bare stream's rate each round had."""
    return [rate / raw for rate, raw in zip(rates[who], rates[RAW], strict=True)]


def table(figures: Figures) -> Table:
    """Show rates and ratios, with the spread over the rounds."""
    shown = Table("case", "who", "GB/s", "least", "greatest", "of recv_into", "least", "greatest", title=QUESTION)
    for case, rates in figures.items():
        for who, values in rates.items():
            cells = [*_spread(values), *_spread(ratios(rates, who))]
            shown.add_row(case, who, *(f"{value:.3g}" for value in cells))
        shown.add_section()
    return shown


def _spread(values: Sequence[float]) -> tuple[float, float, float]:
    return statistics.median(values), min(values), max(values)


def result(figures: Figures, rounds: int) -> dict[str, object]:
    """What is written: every figure of every round, and the ratios."""
    return {
        "rounds": rounds,
        "GB/s": {case: {who: {**report.spread(v), "rounds": v} for who, v in r.items()} for case, r in figures.items()},
        "of recv_into": {
            case: {who: report.spread(ratios(rates, who)) for who in rates} for case, rates in figures.items()
        },
    }


def main(arguments: Sequence[str] | None = None) -> Path:
    """Measure, print, and write results/bulk.json."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bulk", description=QUESTION)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--quick", action="store_true", help="a small size, to see that everything runs")
    parser.add_argument("--output", type=Path, default=report.RESULTS, help="folder of the results")
    options = parser.parse_args(arguments)
    figures: Figures = {}
    for name, (shape, kind) in (QUICK if options.quick else CASES).items():
        data = np.random.default_rng(0).integers(0, 100, shape).astype(kind)
        figures.update(measure(name, data, options.rounds, _note))
    Console(width=110).print(table(figures))
    return report.write("bulk", QUESTION, result(figures, options.rounds), options.output)


def _note(text: str) -> None:
    sys.stderr.write(text + "\n")


if __name__ == "__main__":
    main()
