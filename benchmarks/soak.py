"""Does a queue keep what it should have let go? Streams rows through it for minutes and watches its process.

python -m benchmarks.soak [--seconds N] [--every N] [--output FOLDER]

One process puts, this one takes and acknowledges, a third serves. Resident memory, bytes in /dev/shm and open
descriptors of all three are read at intervals. A figure is flat if its median over the last quarter is no more than
that over the second quarter and an allowance: the first quarter is the time to warm up.
"""

import argparse
import re
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TypeAlias

import psutil

from asyncflow.errors import QueueClosed
from asyncflow.storage import TransferQueue
from asyncflow.storage.client import Stream
from benchmarks import report
from benchmarks.rows import Case
from benchmarks.subjects import arrow, child

QUESTION = "Does a queue keep what it should have let go?"
CASE = Case("soak", "tokens", 64)
MAX_ROWS = 16 * CASE.count
SHARED = Path("/dev/shm")
ALLOWED = {"rss": 0.05, "shm": 0.05, "descriptors": 0.0}
"""Growth that still is noise, as a share."""
SLACK = {"rss": 8 << 20, "shm": 1 << 20, "descriptors": 2}
"""Growth that still is noise where there is little to begin with."""

Samples: TypeAlias = dict[str, list[float]]


def observe(processes: Sequence[psutil.Process]) -> dict[str, float]:
    """Read what the processes hold now; of shared memory, the files of the queue that they have mapped."""
    maps = "".join(Path(f"/proc/{process.pid}/maps").read_text() for process in processes)
    arenas = set(re.findall(rf"{SHARED}/(asyncflow-[0-9a-f]+)-", maps))
    files = [file for file in SHARED.iterdir() if file.name.rpartition("-")[0] in arenas]
    return {
        "rss": sum(process.memory_info().rss for process in processes),
        "shm": sum(map(_size, files)),
        "descriptors": sum(process.num_fds() for process in processes),
    }


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except FileNotFoundError:  # let go meanwhile
        return 0


def flat(name: str, values: Sequence[float]) -> bool:
    """Whether a figure stopped growing."""
    quarter = max(1, len(values) // 4)
    before = statistics.median(values[quarter : 2 * quarter] or values)
    after = statistics.median(values[-quarter:])
    return after <= before * (1 + ALLOWED[name]) + SLACK[name]


def soak(seconds: float, every: float) -> tuple[Samples, int]:
    """Stream for so long; return the samples, and how many rows went through."""
    samples: Samples = {"seconds": [], "rss": [], "shm": [], "descriptors": []}
    with (
        tempfile.TemporaryDirectory() as folder,
        child("serve", f"ipc://{folder}/queue") as server,
        TransferQueue.open(f"ipc://{folder}/queue") as queue,
    ):
        batch = arrow(CASE.rows())
        table = queue.create_table("rows", batch.schema, max_rows=MAX_ROWS)
        table.task("get", reads=batch.names)
        with child("produce", queue.url, str(CASE.count), "0") as producer:
            processes = [psutil.Process(), psutil.Process(server.pid), psutil.Process(producer.pid)]
            took = threading.Thread(target=take, args=(table.stream("get", rows=CASE.count),), daemon=True)
            took.start()
            watch(samples, processes, seconds, every)
            rows = table.ledger().done
    took.join(60)
    return samples, rows


def take(stream: Stream) -> None:
    """Take and acknowledge until the queue closes."""
    try:
        while (lease := stream.next()) is not None:
            lease.done()
    except QueueClosed:
        return


def watch(samples: Samples, processes: Sequence[psutil.Process], seconds: float, every: float) -> None:
    """Read what the processes hold at intervals."""
    started = time.monotonic()
    while (passed := time.monotonic() - started) < seconds:
        samples["seconds"].append(round(passed, 1))
        for name, value in observe(processes).items():
            samples[name].append(value)
        time.sleep(every)


def main(arguments: Sequence[str] | None = None) -> int:
    """Soak, write results/soak.json, and return 1 if something grew."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.soak", description=QUESTION)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--every", type=float, default=5.0)
    parser.add_argument("--output", type=Path, default=report.RESULTS, help="folder of the results")
    options = parser.parse_args(arguments)
    samples, rows = soak(options.seconds, options.every)
    verdict = {name: flat(name, samples[name]) for name in ALLOWED}
    report.write("soak", QUESTION, {"rows": rows, "flat": verdict, "samples": samples}, options.output)
    for name, good in verdict.items():
        values = samples[name]
        state = "flat" if good else "GROWS"
        print(f"{name}: {state}, first {values[0]:,.0f}, greatest {max(values):,.0f}, last {values[-1]:,.0f}")
    print(f"{rows:,} rows in {options.seconds:g} s")
    return 0 if all(verdict.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
