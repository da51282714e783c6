"""Keys: who gets in, who is told what, and that every kind of client can have them."""

import asyncio
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import zmq
from zmq.auth import load_certificate

from asyncflow.errors import AccessDenied, MissingDependency, StorageError
from asyncflow.storage import Schema, TransferQueue, aio, kv
from asyncflow.storage.arena import region_of
from asyncflow.storage.connection import Connection
from asyncflow.storage.keys import VARIABLE, create
from asyncflow.storage.loader import Loader

SCHEMA = Schema({"x": "int64", "blob": "bytes"})


@pytest.fixture
def keys(tmp_path):
    create(tmp_path / "keys")
    return tmp_path / "keys"


@pytest.fixture
def host():
    with TransferQueue.open() as queue:
        queue.create_table("t", SCHEMA).task("all", reads=("x",))
        yield queue


@pytest.fixture(params=["ipc", "tcp", "all"])
def url(request, address, host, keys):
    return host.serve({"ipc": address, "tcp": "tcp://127.0.0.1:*", "all": "tcp://0.0.0.0:*"}[request.param], keys)


def test_secret_files_are_private_and_nothing_is_written_twice(keys):
    secrets = sorted(keys.rglob("*_secret"))
    assert [path.relative_to(keys).as_posix() for path in secrets] == [
        "client/client.key_secret", "server/server.key_secret",
    ]  # fmt: skip
    assert {path.stat().st_mode & 0o777 for path in secrets} == {0o600}
    before = {path: path.read_bytes() for path in secrets}
    with pytest.raises(StorageError, match="client is there already"):
        create(keys)
    create(keys, "second")
    assert before == {path: path.read_bytes() for path in secrets}
    assert load_certificate(keys / "second" / "server.key") == load_certificate(keys / "client" / "server.key")


@pytest.mark.parametrize("name", ["server", "", "../x", "a/b", ".hidden"])
def test_a_client_of_a_strange_name_gets_no_keys(tmp_path, name):
    with pytest.raises(StorageError, match="is no name for a client"):
        create(tmp_path / "keys", name)
    assert not (tmp_path / "keys").exists()


def test_a_client_with_keys_puts_and_reads(url, keys):
    with TransferQueue.open(url, 30, keys) as client:
        table = client.table("t")
        blob = os.urandom(3 << 20)
        rows = table.put({"x": [5], "blob": [blob]})
        batch = table.read(rows, ["x", "blob"])
        assert (batch["x"].array[0], bytes(batch["blob"][0])) == (5, blob)
        assert region_of(batch["blob"].values) is not None  # on this host through shared memory, encrypted or not


def test_a_client_without_keys_is_refused(url):
    for _ in range(3):  # libzmq tells it in one of two ways
        with pytest.raises(AccessDenied, match="keys"):
            TransferQueue.open(url, 30)


def test_a_client_that_the_server_does_not_know_is_refused_until_it_is_added(url, keys, tmp_path):
    create(keys, "late")
    public = keys / "server" / "clients" / "late.key"
    public.rename(tmp_path / "late.key")
    mine = tmp_path / "mine"
    shutil.copytree(keys / "late", mine / "client")
    with pytest.raises(AccessDenied, match=r"does not know the key of this client, .*mine/client/client\.key_secret"):
        TransferQueue.open(url, 30, mine)
    (tmp_path / "late.key").rename(public)
    TransferQueue.open(url, 30, mine).close()


def test_a_client_that_trusts_another_server_is_told(url, keys, tmp_path):
    create(tmp_path / "other")
    shutil.copy(tmp_path / "other" / "client" / "server.key", keys / "client" / "server.key")
    with pytest.raises(AccessDenied, match=r"has not the key that .*client/server\.key says"):
        TransferQueue.open(url, 30, keys)


def test_a_refusal_that_comes_before_anybody_has_looked_for_one_is_told(url, monkeypatch):
    connect = Connection._connect

    def slowly(self, url):
        connect(self, url)
        time.sleep(0.5)  # as where other work has the processor

    monkeypatch.setattr(Connection, "_connect", slowly)
    with pytest.raises(AccessDenied):
        TransferQueue.open(url, 10)


def test_keys_for_a_queue_that_has_none_are_told(host, keys):
    with pytest.raises(AccessDenied, match="is served without keys"):
        TransferQueue.open(host.serve("tcp://127.0.0.1:*"), 30, keys)


def test_who_is_refused_leaves_nothing_and_harms_nobody(url, host, keys):
    before = len(os.listdir("/proc/self/fd"))
    with TransferQueue.open(url, 30, keys) as client:
        for _ in range(5):
            with pytest.raises(AccessDenied):
                TransferQueue.open(url, 30)
        assert client.status().clients == 1
    assert host.status().clients == 0
    assert len(os.listdir("/proc/self/fd")) <= before + 2


@pytest.mark.parametrize("url", ["tcp://0.0.0.0:*", "tcp://*:*", "tcp://[::]:*", "tcp://10.0.0.1:1", "tcp://lo:*"])
def test_beyond_this_host_there_must_be_keys(host, url, monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    with pytest.raises(AccessDenied, match="asyncflow storage keys FOLDER"):
        host.serve(url)


def test_a_client_sends_nothing_beyond_this_host_without_keys(monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    with pytest.raises(AccessDenied, match=f"tcp://192.0.2.1:1 is not on this host's loopback.*{VARIABLE}"):
        TransferQueue.open("tcp://192.0.2.1:1")


def test_an_address_of_another_host_cannot_be_served(host, keys):
    opened = []
    for _ in range(3):
        with pytest.raises(StorageError, match=r"192\.0\.2\.1:1"):
            host.serve("tcp://192.0.2.1:1", keys)
        opened.append(len(os.listdir("/proc/self/fd")))
    assert opened[2] <= opened[0]


def damaged(keys: Path, how: str) -> None:
    for path in keys.rglob("*_secret"):
        match how:
            case "open to all":
                path.chmod(0o644)
            case "missing":
                path.unlink()
            case "empty":
                path.write_text("")
            case "no secret":
                path.write_text(f'    public-key = "{"a" * 40}"\n')
            case "no key":
                path.write_text('    public-key = "abc"\n    secret-key = "abc"\n')


@pytest.mark.parametrize("how", ["open to all", "missing", "empty", "no secret", "no key"])
def test_a_secret_that_cannot_be_used_is_refused_at_both_ends(host, keys, how):
    damaged(keys, how)
    for call in (
        lambda: host.serve("tcp://127.0.0.1:*", keys),
        lambda: TransferQueue.open("tcp://127.0.0.1:1", 9, keys),
    ):
        with pytest.raises(StorageError, match=f"{keys}.*(key|chmod 600)"):
            call()


def test_a_public_key_that_is_damaged_locks_out_only_its_own(url, keys):
    clients = keys / "server" / "clients"
    for text in ("nothing", "public-key", ""):
        (clients / "a.key").write_text(text)
        TransferQueue.open(url, 30, keys).close()
    shutil.rmtree(clients)
    with pytest.raises(AccessDenied):
        TransferQueue.open(url, 30, keys)


def test_without_curve_it_is_said_what_to_install(host, keys, monkeypatch):
    monkeypatch.setattr(zmq, "has", lambda capability: False)
    for call in (
        lambda: create(keys, "more"),
        lambda: host.serve("tcp://127.0.0.1:*", keys),
        lambda: TransferQueue.open("tcp://127.0.0.1:1", 9, keys),
    ):
        with pytest.raises(MissingDependency, match=r"pip install .*pyzmq"):
            call()


def test_awaited_calls_take_keys(url, host, keys):
    async def main():
        async with await aio.connect(url, 30, keys) as queue:
            await (await queue.table("t")).put({"x": [1, 2]})

    asyncio.run(main())
    assert host.table("t").ledger().admitted == 2


def test_a_loader_and_the_calls_of_kv_take_keys_from_argument_or_environment(host, keys, monkeypatch):
    url = host.serve("tcp://0.0.0.0:*", keys)
    host.table("t").put({"x": np.arange(4)})
    host.table("t").seal()
    assert len(list(Loader(url, "t", "all", rows=2, keys=keys))) == 2
    monkeypatch.setenv(VARIABLE, str(keys))
    assert list(Loader(url, "t", "all", rows=2)) == []
    kv.init(url=url)
    try:
        kv.kv_batch_put(["a"], "p", {"v": np.ones((1, 2))})
        assert "kv.rows/p" in host.status().tables
    finally:
        kv.close()


# The largest frame is a GiB; in a process of its own it is made small, so that some are cut.

CUT = """
import os, sys
from asyncflow.storage import arena, frames
frames.MAX_FRAME = 100_000
arena.FOLDER = arena.Path("/none")
from asyncflow.storage import Schema, TransferQueue
with TransferQueue.open() as host:
    host.create_table("t", Schema({"blob": "bytes"}))
    with TransferQueue.open(host.serve("tcp://127.0.0.1:*", sys.argv[1]), 30, sys.argv[1]) as client:
        for size in (99_999, 100_000, 100_001, 300_000):
            blob = os.urandom(size)
            rows = client.table("t").put({"blob": [blob]})
            assert bytes(client.table("t").read(rows, ["blob"])["blob"][0]) == blob
"""


def test_the_largest_frame_fits_when_it_is_encrypted(keys):
    done = subprocess.run([sys.executable, "-c", CUT, str(keys)], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
