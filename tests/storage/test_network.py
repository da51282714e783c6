"""Two hosts, made of network namespaces with a cable between them: what crosses it, and what happens when it is cut."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from subprocess import PIPE

import pytest

from asyncflow.storage.keys import create

NEAR, FAR = "10.81.7.1", "10.81.7.2"
PATH = os.environ["PATH"] + ":/usr/sbin:/sbin"

SERVER = """
import sys
from asyncflow.storage import Schema, TransferQueue
queue = TransferQueue.open()
columns = {"f": "float32[3]", "h": "bfloat16", "b": "bool", "ids": "list<int64>", "text": "string", "blob": "bytes"}
table = queue.create_table("t", Schema(columns))
table.task("all", reads=tuple(columns))
large = queue.create_table("large", Schema({"image": "uint8[1048576]", "ids": "list<int64>"}))
large.task("all", reads=("image", "ids"))
print(queue.serve(f"tcp://{sys.argv[1]}:*", sys.argv[2]), queue._link._arena.name, flush=True)
sys.stdin.readline()
lease = table.stream("all", rows=8).next(120)
print(lease.attempt, lease.rows.tolist(), flush=True)
sys.stdin.readline()
"""

CELLS = """
import sys
import numpy as np
from asyncflow.errors import StorageError
from asyncflow.storage import Batch, TransferQueue
from asyncflow.storage.arena import region_of
url, keys = sys.argv[1:]
queue = TransferQueue.open(url, 60, keys)
table = queue.table("t")
def cells(seed):
    draw = np.random.default_rng(seed)
    f = draw.standard_normal((4, 3), np.float32)
    f[0] = np.nan, np.inf, -0.0
    return Batch.of(table.schema, {
        "f": f, "h": draw.integers(0, 1 << 16, 4, np.uint16), "b": np.array([True, False, True, False]),
        "ids": [draw.integers(-1 << 62, 1 << 62, n) for n in (0, 1, 400_000, 7)],
        "text": ["", "é漢字", "x" * 100_000, "\\0"], "blob": [draw.bytes(n) for n in (5 << 20, 0, 1, 3 << 20)]})
def images(seed):
    draw = np.random.default_rng(seed)
    return {"image": draw.integers(0, 256, (40, 1 << 20), np.uint8),
            "ids": [draw.integers(-1 << 62, 1 << 62, n) for n in range(100_000, 100_040)]}
def same(found, given):
    return all(np.array_equal(a, b) for name in given.names for a, b in zip(found[name].raw, given[name].raw))
"""

PUT = """
table.put(cells(1))
table.put(cells(2))
"""

TAKE = """
stream = table.stream("all", rows=4)
for seed in (1, 2):
    lease = stream.next()
    assert same(lease.batch, cells(seed))
    print("wire" if region_of(lease.batch["blob"].values) is None else "memory", flush=True)
    lease.done()
"""

CUT_OFF = """
lease = table.stream("all", rows=2).next()
idle = table.stream("all", rows=1000)
print(lease.rows.tolist(), flush=True)
sys.stdin.readline()
for call in (lambda: table.put(cells(3), timeout=2), lambda: idle.next(120), table.status, queue.status):
    try:
        call()
    except StorageError as error:
        print(type(error).__name__, error, flush=True)
"""


class Host:
    """A network namespace that lives as long as the process in it."""

    def __init__(self, stack: ExitStack, command: list[str]) -> None:
        self._stack = stack
        self._keeper = stack.enter_context(subprocess.Popen(command, stdin=PIPE, stdout=PIPE, stderr=PIPE))
        stack.callback(self._keeper.kill)
        if self._keeper.stdout.readline() != b"ready\n":
            why = self._keeper.communicate()[1].decode().strip()
            pytest.skip(f"this machine makes no namespaces: {' '.join(command)}: {why}")

    @property
    def pid(self) -> str:
        return str(self._keeper.pid)

    def inside(self, *command: str) -> list[str]:
        return ["nsenter", "--preserve-credentials", "-U", "-n", "-m", f"--wd={Path.cwd()}", "-t", self.pid, *command]

    def ip(self, words: str) -> None:
        done = subprocess.run(self.inside("ip", *words.split()), capture_output=True, text=True, env={"PATH": PATH})
        if done.returncode:
            pytest.skip(f"this machine connects no namespaces: ip {words}: {done.stderr.strip()}")

    def python(self, code: str, *arguments: str) -> "subprocess.Popen[str]":
        command = self.inside(sys.executable, "-c", code, *arguments)
        started = self._stack.enter_context(subprocess.Popen(command, stdin=PIPE, stdout=PIPE, text=True))
        self._stack.callback(started.kill)
        return started


@pytest.fixture
def near() -> Iterator[Host]:
    for tool in ("unshare", "nsenter", "ip"):
        if shutil.which(tool, path=PATH) is None:
            pytest.skip(f"this machine has no `{tool}`")
    with ExitStack() as stack:
        yield Host(stack, ["unshare", "-rnm", "sh", "-c", "echo ready; exec cat"])


def far(near: Host, memory: str) -> Host:
    """Return a host at the other end of a cable, which sees shared memory of its own, or what `memory` prepares."""
    keeper = near.inside("unshare", "-nm", "sh", "-ec", f"{memory}; echo ready; exec cat")
    host = Host(near._stack, keeper)
    near.ip(f"link add near type veth peer name far netns {host.pid}")
    for side, device, address in ((near, "near", NEAR), (host, "far", FAR)):
        side.ip(f"address add {address}/24 dev {device}")
        side.ip(f"link set {device} up")
    return host


# What the far host has for shared memory: its own, and that with a copy of what lies in the near one's.
OWN = "mount -t tmpfs none /dev/shm"
COPY = f"mkdir {{0}}/copy; cp -p /dev/shm/asyncflow-{{1}}* {{0}}/copy; {OWN}; cp -p {{0}}/copy/* /dev/shm"


@pytest.fixture
def keys(tmp_path: Path) -> str:
    create(tmp_path / "keys")
    return str(tmp_path / "keys")


def run(host: Host, code: str, *arguments: str) -> str:
    process = host.python(code, *arguments)
    told, _ = process.communicate(timeout=120)
    assert process.returncode == 0
    return told


LARGE = """
table = queue.table("large")
rows = table.put(images(1))
lease = table.stream("all", rows=40).next()
assert same(lease.batch, Batch.of(table.schema, images(1)))
came = region_of(lease.batch["image"].values)
print(came is not None and not came.shared, queue._link._bulk, flush=True)
lease.done()
"""


def test_large_batches_cross_beside_the_connection(near, keys):
    server = near.python(SERVER, "0.0.0.0", keys)
    url, _ = server.stdout.readline().split()
    other = far(near, OWN)
    url = f"tcp://{NEAR}:{url.rpartition(':')[2]}"
    assert run(other, CELLS + LARGE, url, keys).split() == ["True", "True"]


@pytest.mark.parametrize(
    ("memory", "way"), [(OWN, "wire"), ("true", "memory"), (COPY, "wire")], ids=["own", "same", "copied"]
)
def test_rows_reach_another_host_bit_for_bit(near, keys, tmp_path, memory, way):
    server = near.python(SERVER, "0.0.0.0", keys)
    url, name = server.stdout.readline().split()
    other = far(near, memory.format(tmp_path, name))
    url = f"tcp://{NEAR}:{url.rpartition(':')[2]}"
    near.ip("link set lo up")
    assert run(other, CELLS + PUT + TAKE, url, keys).split() == [way, way]
    run(other, CELLS + PUT, url, keys)
    assert run(near, CELLS + TAKE, url, keys).split() == ["memory", "memory"]


def test_a_cable_that_is_cut_ends_calls_and_gives_leases_back(near, keys):
    other = far(near, OWN)
    server = near.python(SERVER, NEAR, keys)
    url, _ = server.stdout.readline().split()
    client = other.python(CELLS + PUT + CUT_OFF, url, keys)
    assert client.stdout.readline() == "[0, 1]\n"
    near.ip("link set near down")
    for process in (client, server):
        process.stdin.write("the cable is cut\n")
        process.stdin.flush()
    assert client.stdout.readline().startswith(("WaitTimeout the queue at", "QueueClosed the queue at"))
    for _ in range(3):
        assert client.stdout.readline() == f"QueueClosed the queue at {url} is gone: the connection broke\n"
    assert server.stdout.readline() == "2 [0, 1, 2, 3, 4, 5, 6, 7]\n"
