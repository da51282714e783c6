"""What else is measured where it is installed: Redis Streams, and the object store of the peer's Ray."""

import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.rows import Case, Rows
from benchmarks.subjects import PAUSE, ROOT, Copy, Peer, Times, timed

KEY, GROUP = "rows", "get"
START = 30.0


class Redis(Copy):
    """Redis Streams over a socket of this host: an entry is a batch, a field a buffer."""

    name = "redis"

    @staticmethod
    def installed() -> bool:
        """Whether server and client are there."""
        try:
            import redis  # noqa: F401
        except ModuleNotFoundError:
            return False
        return shutil.which("redis-server") is not None

    @contextmanager
    def _server(self) -> Iterator[Any]:
        with tempfile.TemporaryDirectory() as folder:
            options = ["--port", "0", "--unixsocket", f"{folder}/redis", "--save", "", "--appendonly", "no"]
            with subprocess.Popen(["redis-server", *options], stdout=subprocess.DEVNULL, cwd=folder) as process:
                try:
                    yield connected(f"{folder}/redis")
                finally:
                    process.kill()

    def batches(self, case: Case, repeat: int) -> Times:
        """Add a batch; read it as a member of a group, acknowledge and delete it."""
        fields, times = entry(case.rows()), Times(put=[], get=[])
        with self._server() as client:
            client.xgroup_create(KEY, GROUP, mkstream=True)
            for number in range(repeat + 1):
                put = timed(lambda: client.xadd(KEY, fields))
                started = time.perf_counter()
                found = take(client)
                get = time.perf_counter() - started
                if number == 0:
                    assert found == {name.encode(): value for name, value in fields.items()}
                else:
                    times["put"].append(put)
                    times["get"].append(get)
        return times

    def stream(self, rows: int, number: int) -> float:
        """Batches from a process that adds to this one."""
        with self._server() as client:
            client.xgroup_create(KEY, GROUP, mkstream=True)
            with self._other("add", client, str(rows), str(number), "0"):
                take(client)
                started = time.perf_counter()
                for _ in range(number - 1):
                    take(client)
                return rows * (number - 1) / (time.perf_counter() - started)

    def latency(self, number: int) -> list[float]:
        """One row from another process to this one, which waits for it; it carries the time at which it was added."""
        with self._server() as client:
            client.xgroup_create(KEY, GROUP, mkstream=True)
            with self._other("add", client, "1", str(number), str(PAUSE)):
                times = []
                for _ in range(number):
                    began = float(take(client, acknowledge=False)[b"began"])
                    times.append(time.perf_counter() - began)
                return times

    @contextmanager
    def _other(self, do: str, client: Any, *arguments: str) -> Iterator[None]:
        path = client.connection_pool.connection_kwargs["path"]
        command = [sys.executable, "-m", "benchmarks.others", do, path, *arguments]
        with subprocess.Popen(command, cwd=ROOT) as process:
            try:
                yield
            finally:
                process.kill()


def connected(path: str) -> Any:
    """Return a client of a server that has just been started."""
    import redis

    deadline = time.monotonic() + START
    while time.monotonic() < deadline:
        client = redis.Redis(unix_socket_path=path)
        try:
            client.ping()
        except redis.ConnectionError:
            time.sleep(0.01)
            continue
        return client
    raise TimeoutError(f"redis-server does not answer at {path} within {START:g} s")


def entry(rows: Rows) -> dict[str, bytes | memoryview]:
    """Return rows as the fields of an entry."""
    return {
        f"{name}{at}": buffer.view(np.uint8).data.tobytes()
        for name, column in rows.items()
        for at, buffer in enumerate(column)
        if buffer is not None
    }


def take(client: Any, *, acknowledge: bool = True) -> dict[bytes, bytes]:
    """Return the next entry of the group; wait for it."""
    found: list[Any] = []
    while not found:
        found = client.xreadgroup(GROUP, "benchmark", {KEY: ">"}, count=1, block=10_000)
    ((number, fields),) = found[0][1]
    if acknowledge:
        client.pipeline().xack(KEY, GROUP, number).xdel(KEY, number).execute()
    return dict(fields)


class RayStore(Copy):
    """The object store of the Ray that the peer has started: a list of arrays as one object."""

    name = "ray store"

    def __init__(self, peer: Peer) -> None:
        self._peer = peer

    def batches(self, case: Case, repeat: int) -> Times:
        """Put the arrays, and get them."""
        times: Times = self._peer.ask("stored", kind=case.kind, rows=case.count, repeat=repeat)
        return times


def add(path: str, rows: str, number: str, pause: str) -> None:
    """Add entries one after another."""
    client, fields = connected(path), entry(Case("", "tokens", int(rows)).rows())
    for _ in range(int(number)):
        time.sleep(float(pause))
        client.xadd(KEY, {**fields, "began": repr(time.perf_counter())})
    time.sleep(START)


if __name__ == "__main__":
    assert Path(sys.argv[2]).exists()
    {"add": add}[sys.argv[1]](*sys.argv[2:])
