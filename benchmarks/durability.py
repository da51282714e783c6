"""What does it cost that a queue outlives its process, or a loss of power?

python -m benchmarks.durability [--rounds N] [--folder FOLDER] [--output FOLDER] [--quick]

A queue in this process for each level of durability, its folder below FOLDER, so on the disk that is asked about. In
every round each level does the same in turn: batches are put, taken and acknowledged, by one thread and by several at
once, who share a sync. A figure is seconds for one batch; what counts is its ratio to `memory` in the same round.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from asyncflow.storage import TransferQueue
from asyncflow.storage.client import Table
from asyncflow.storage.journal import LEVELS
from benchmarks import report
from benchmarks.rows import Case, nbytes
from benchmarks.subjects import arrow

QUESTION = "What does it cost that a queue outlives its process, or a loss of power?"
CASES = (
    (Case("8 rows of tokens", "tokens", 8), 100),
    (Case("256 rows of tokens", "tokens", 256), 20),
    (Case("16 rows of 1 MiB", "blobs", 16), 6),
)
THREADS = (1, 8)


def measure(case: Case, repeat: int, threads: int, folder: Path, durability: str) -> float:
    """Return the seconds of one batch: put, taken and acknowledged."""
    rows = arrow(case.rows())
    place = None if durability == "memory" else tempfile.mkdtemp(dir=folder)
    with TransferQueue.open(durability=durability, folder=place) as queue:
        table = queue.create_table("t", rows.schema)
        table.task("use", rows.names)
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(lambda _: _use(table, case, 1), range(threads)))
            begin = time.perf_counter()
            list(pool.map(lambda _: _use(table, case, repeat // threads), range(threads)))
            return (time.perf_counter() - begin) / (repeat // threads * threads)


def _use(table: Table, case: Case, repeat: int) -> None:
    rows = arrow(case.rows())
    with table.stream("use", rows=case.count) as stream:
        for _ in range(repeat):
            table.put(rows)
            lease = stream.next()
            assert lease is not None
            lease.done()


def rounds(count: int, folder: Path, share: int) -> dict[str, dict[str, list[float]]]:
    """Return the seconds of each round, by case and durability; `share` leaves out most of the work."""
    found: dict[str, dict[str, list[float]]] = {}
    for _ in range(count):
        for case, repeat in CASES:
            for threads in THREADS:
                key = f"{case.name} ({nbytes(case.rows()) / 1e6:.1f} MB), {threads} thread{'s' * (threads > 1)}"
                for durability in LEVELS:
                    with tempfile.TemporaryDirectory(dir=folder) as place:
                        seconds = measure(case, max(repeat // share, threads), threads, Path(place), durability)
                    found.setdefault(key, {}).setdefault(durability, []).append(seconds)
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, write the result, and show it."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.durability", description=QUESTION)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--folder", type=Path, help="where the logs are written: the disk that is asked about")
    parser.add_argument("--output", type=Path, default=report.RESULTS, help="folder of the results")
    parser.add_argument("--quick", action="store_true", help="a tenth of the work, to try it out")
    options = parser.parse_args(arguments)
    found = rounds(options.rounds, options.folder, 10 if options.quick else 1)
    result = {}
    for case, levels in found.items():
        ratios = {
            name: report.spread([one / base for one, base in zip(seconds, levels["memory"], strict=True)])
            for name, seconds in levels.items()
        }
        result[case] = {"ms": {name: report.spread([1e3 * each for each in levels[name]]) for name in levels}} | {
            "ratio to memory": ratios
        }
        shown = ", ".join(f"{name} {ratio['median']:.1f}" for name, ratio in ratios.items() if name != "memory")
        print(f"{case}: memory 1, {shown}")
    report.write("durability", QUESTION, {"rounds": options.rounds, "cases": result}, options.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
