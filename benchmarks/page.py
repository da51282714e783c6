"""The page docs/queue-benchmark.md, from results/queue.json: `python -m benchmarks.page` writes it anew."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks import report

PAGE = Path(__file__).parent.parent / "docs" / "queue-benchmark.md"

HEAD = """# How fast rows go through the queue

Made by `python -m benchmarks.page` from [results/queue.json](../benchmarks/results/queue.json), which
`python -m benchmarks.queue --peer PYTHON` writes; PYTHON is the interpreter of an environment with the `bench` extra.

- **memcpy** copies the same buffers into warm memory: the floor for anything that keeps data.
- **pyzmq** sends them to another process in one multipart message and waits for an empty answer.
- **embedded** is our queue in this process, **ipc** the same served by a process of its own; a get leases and
  acknowledges. Embedded, a get hands out views of what is held and copies nothing.
- **transferqueue** is the public package: a client, its controller and two storage units, which are processes. A put
  is that of its client, a get its `get_meta` and `get_data`; it is polled every millisecond where it has to wait.
- **redis** is Redis Streams over a socket of this host, an entry a batch; **ray store** puts and gets the arrays as one
  object of the store of the Ray that the public package has started. Neither joins columns nor knows of tasks.

All of them do the same work in turn, round after round, on the same rows, compared after the first trip. A figure is
the median of the rounds' medians, with the least and the greatest; what grows with what is held (D) is measured in
the first round alone. The machine is shared and throttled, so ratios
within a case say more than the figures.
"""

WHY = """What misses its aim with few rows does so by the fixed cost of an operation, which hardly depends on its size
(compare a get of 8 rows with one of 64 MiB, and what was written in place): Python in the server and in the client, and
for a get two round trips, the lease and its end; the public package has no such end. So the price is small where
batches are large, and several batches in flight (`credit`, `send_put`) hide a part of it where they are not. A put of
64 MiB is one copy into shared memory beside that cost, and a get is none.
"""

TOKENS, SMALL, BLOBS = "a: 256 rows of tokens, ms", "b: 8 rows of tokens, ms", "c: 64 rows of 1 MiB, ms"
STREAM, HELD = "b: batches of 8 from process to process, rows/s", "d: a row through 8 tasks, µs"
DELIVERED, PLACED = "e: one row through an idle queue, µs", "f: rows of 1 MiB put where they were written, ms"

AIMS = (
    (TOKENS, ("transferqueue put",), ("ipc put",), 12.0, "put of 256 rows: transferqueue / ipc"),
    (TOKENS, ("transferqueue get",), ("ipc get",), 12.0, "get of 256 rows: transferqueue / ipc"),
    (SMALL, ("transferqueue put",), ("ipc put",), 10.0, "put of 8 rows: transferqueue / ipc"),
    (SMALL, ("transferqueue get",), ("ipc get",), 10.0, "get of 8 rows: transferqueue / ipc"),
    (STREAM, ("ipc stream",), ("transferqueue stream",), 50.0, "rows/s of streamed batches of 8: ipc / transferqueue"),
    (BLOBS, ("transferqueue put",), ("ipc put",), 5.0, "put of 64 MiB: transferqueue / ipc"),
    (BLOBS, ("transferqueue get",), ("ipc get",), 5.0, "get of 64 MiB: transferqueue / ipc"),
    (BLOBS, ("memcpy copy",), ("ipc put", "ipc get"), 0.7, "64 MiB: a warm copy / ipc put and get together"),
    (PLACED, ("ipc put of 1",), ("ipc put of 64",), 0.8, "put of what was written in place: 1 MiB / 64 MiB"),
    (HELD, ("ipc with 1000 held",), ("ipc with 1000000 held",), 1 / 1.2, "a row: with 10³ held / with 10⁶ held"),
    (DELIVERED, ("pyzmq delivered",), ("ipc delivered",), 0.5, "one row: a bare round trip / from put to delivery"),
)
"""Of each aim: the case, the figures that are added above and below the line, the least ratio, and its words."""


def page(found: Mapping[str, Any]) -> str:
    """Return the page for a result."""
    return HEAD + "".join(f"{line}\n" for line in _lines(found))


def _lines(found: Mapping[str, Any]) -> Iterator[str]:
    peer = ", ".join(f"{name} {version}" for name, version in found["peer"].items()) or "not measured"
    yield ""
    yield (
        f"{found['cores']} cores of {found['cpu']}, load {found['load']:.1f}, Python {found['python']}, commit "
        f"{found['commit']}, {found['rounds']} rounds; transferqueue {peer.removeprefix('version ')}."
    )
    yield "\n## What is aimed at\n"
    yield from ("| ratio | aim | measured |", "|---|---|---|")
    for case, above, below, aim, words in AIMS:
        rows = found["figures"].get(case, {})
        if {*above, *below} <= rows.keys():
            one, other = (sum(rows[name]["median"] for name in names) for names in (above, below))
            yield f"| {words} | {aim:.2g} or more | {one / other:.2g} |"
    yield f"\n{WHY}"
    for case, rows in found["figures"].items():
        size = found["bytes"].get(case.removesuffix(", ms"))
        yield f"\n## {case[0].upper()}{case[1:]}{f' ({size / 1e6:.3g} MB)' if size else ''}\n"
        yield from ("| | median | least | greatest |", "|---|---|---|---|")
        for who, figure in rows.items():
            yield f"| {who} | " + " | ".join(f"{figure[key]:,.4g}" for key in ("median", "min", "max")) + " |"
    yield "\n![The same as bars](../benchmarks/results/queue.png)"


def main() -> None:
    """Write the page."""
    PAGE.write_text(page(json.loads((report.RESULTS / "queue.json").read_text())))


if __name__ == "__main__":
    main()
