"""The server against clients that misbehave, and clients against a server that does."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgpack
import numpy as np
import pytest
import zmq
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from asyncflow.errors import LeaseLost, QueueClosed, SchemaError, StorageError, WaitTimeout
from asyncflow.storage import Batch, Schema, TransferQueue, wire
from asyncflow.storage.arena import Arena
from asyncflow.storage.controller import Controller
from asyncflow.storage.server import Server


@pytest.fixture
def host(address: str) -> Iterator[TransferQueue]:
    with TransferQueue.open("embedded://") as queue:
        queue.serve(address)
        yield queue


@pytest.fixture
def dealer(host: TransferQueue, address: str) -> Iterator["zmq.Socket[bytes]"]:
    """A socket that says what it likes."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.RCVTIMEO, 30_000)
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(address)
        yield socket


def ask(dealer, *parts):
    dealer.send_multipart(parts)
    return msgpack.unpackb(dealer.recv_multipart()[0])


HELLO = msgpack.packb({"call": 1, "body": {"kind": "hello", "protocol": wire.PROTOCOL}})


@pytest.mark.parametrize(
    ("message", "number"),
    [
        (b"", -1),
        (b"\xff" * 100, -1),
        (msgpack.packb({"call": 9, "body": {"kind": "format disk"}}), 9),
        (msgpack.packb({"call": 9, "body": {"kind": "seal", "table": 3}}), 9),
        (b"\x91" * 100_000, -1),
    ],
)
def test_what_cannot_be_read_gets_an_error_reply(dealer, host, message, number):
    reply = ask(dealer, message)
    assert (reply["call"], reply["body"]["kind"], reply["body"]["error"]) == (number, "failure", "WireError")
    assert host.status().failed is None


def test_noise_harms_nobody(dealer, host):
    @settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(st.lists(st.binary(max_size=60), min_size=1, max_size=4))
    def noise(parts):
        assert ask(dealer, *parts)["body"]["kind"] == "failure"

    noise()
    assert ask(dealer, HELLO)["body"]["kind"] == "welcome"


def test_a_greeting_comes_first_and_in_our_protocol(dealer):
    status = msgpack.packb({"call": 2, "body": {"kind": "status"}})
    assert "hello" in ask(dealer, status)["body"]["message"]
    other = msgpack.packb({"call": 1, "body": {"kind": "hello", "protocol": 99}})
    assert "protocol 99" in ask(dealer, other)["body"]["message"]
    ask(dealer, HELLO)
    assert ask(dealer, status)["body"]["queue"]["clients"] == 1


def test_a_request_without_its_batch_is_refused(dealer, host):
    host.create_table("t", Schema({"x": "int64"}))
    ask(dealer, HELLO)
    put = msgpack.packb({"call": 2, "body": {"kind": "put", "table": "t", "put_id": b"1"}})
    assert ask(dealer, put)["body"]["error"] == "SchemaError"


def test_a_put_that_is_sent_again_is_harmless(dealer, host):
    table = host.create_table("t", Schema({"x": "int64"}))
    ask(dealer, HELLO)
    put = wire.encode_call(5, wire.Put("t", b"same"), table.read(table.put({"x": [1, 2]}), ["x"]))
    assert ask(dealer, *put)["body"] == ask(dealer, *put)["body"]
    assert table.ledger().admitted == 4


@pytest.mark.parametrize("maps", [False, True])
@pytest.mark.parametrize("place", [(1, 0), (99, 0), (-1, 0), (1, 1 << 40), (1, -64), (2**62, 2**62)])
def test_a_place_in_memory_that_was_not_granted_is_refused(dealer, host, maps, place):
    host.create_table("t", Schema({"x": "int64"}))
    ask(dealer, HELLO)
    if maps:
        dealer.send(msgpack.packb({"call": 2, "body": {"kind": "map"}}))
    header, *_ = wire.encode_call(3, wire.Put("t", b"1"), Batch({"x": np.arange(8192)}))
    message = msgpack.unpackb(header)
    message["batch"]["places"] = [place]
    reply = ask(dealer, msgpack.packb(message), b"")
    assert (reply["call"], reply["body"]["kind"]) == (3, "failure")
    assert host.status().tables["t"].rows == 0


@pytest.mark.parametrize(
    "body",
    [
        {"kind": "grant", "bytes": -1, "left": []},
        {"kind": "grant", "bytes": 1 << 62, "left": []},
        {"kind": "grant", "bytes": 8, "left": [5]},
        {"kind": "unpin", "counts": {7: 1}},
        {"kind": "unpin", "counts": {7: -1}},
    ],
)
def test_claims_on_memory_that_is_not_ones_own_are_refused(dealer, host, body):
    ask(dealer, HELLO)
    dealer.send(msgpack.packb({"call": 2, "body": {"kind": "map"}}))
    assert ask(dealer, msgpack.packb({"call": 3, "body": body}))["body"]["error"] == "WireError"
    assert host.status().failed is None


class Faulty(Controller):
    def _handle(self, ticket):
        raise ZeroDivisionError("a bug")


def test_a_fault_in_a_handler_is_told_and_kills_nothing(tmp_path, caplog):
    controller, arena = Faulty(), Arena()
    server = Server(controller, f"ipc://{tmp_path}/faulty", arena, arena.writer(0))
    client = TransferQueue.open(server.url)
    for _ in range(2):
        with pytest.raises(StorageError, match="ZeroDivisionError: a bug"):
            client.status()
    assert "a bug" in caplog.text
    client.close()
    controller.close()
    server.close()


@pytest.mark.parametrize("url", ["inproc://x", "x", "ipc:///no/such/folder/q", "tcp://", "tcp://127.0.0.1"])
def test_what_is_no_address_is_not_served(host, url):
    with pytest.raises(StorageError):
        host.serve(url)


@pytest.mark.parametrize("port", ["70000", "65536", "-1", "http", "", "1e3"])
def test_a_port_that_does_not_exist_is_refused(host, port):
    for call in (host.serve, TransferQueue.open):
        with pytest.raises(
            StorageError, match=f"tcp://127.0.0.1:{port}: .* is no port; expected a number from 1 to 65535"
        ):
            call(f"tcp://127.0.0.1:{port}")
    assert host.serve("tcp://127.0.0.1:0").startswith("tcp://127.0.0.1:")


def test_a_closed_queue_is_not_served(tmp_path):
    queue = TransferQueue.open()
    queue.close()
    for url in (f"ipc://{tmp_path}/late", "tcp://127.0.0.1:*"):
        with pytest.raises(QueueClosed, match=f"is closed: it cannot be served at {url.replace('*', '.')}"):
            queue.serve(url)
    assert not (tmp_path / "late").exists()


def test_an_address_in_use_is_not_taken_over(host, address):
    with TransferQueue.open() as other, pytest.raises(StorageError, match="another process serves"):
        other.serve(address)
    assert Path(address.removeprefix("ipc://")).stat().st_mode & 0o777 == 0o600


def test_nobody_there_is_an_error_that_names_the_peer(tmp_path):
    with pytest.raises(WaitTimeout, match=f"nobody answers at ipc://{tmp_path}/none"):
        TransferQueue.open(f"ipc://{tmp_path}/none", timeout=0.2)


def test_only_the_holder_serves(host, address, tmp_path):
    with TransferQueue.open(address) as client, pytest.raises(StorageError, match="only the one that holds"):
        client.serve(f"ipc://{tmp_path}/other")


def test_descriptors_and_clients_return_to_the_base_line(host, address):
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        with TransferQueue.open(address) as client:
            assert client.status().clients == 1
    assert host.status().clients == 0
    assert len(os.listdir("/proc/self/fd")) <= before + 2


def test_closing_the_holder_ends_the_waits_of_its_clients(host, address, pool):
    host.create_table("t", Schema({"x": "int64"})).task("all", reads=("x",))
    client = TransferQueue.open(address)
    stream = client.table("t").stream("all", rows=1)
    wait = pool.submit(stream.next)
    host.close()
    assert isinstance(wait.exception(), QueueClosed)
    with pytest.raises(QueueClosed):
        client.status()
    client.close()


# Processes that die. Each child tells on its standard output when it is where the test wants it.

SERVER = """
import sys
from asyncflow.storage import Schema, TransferQueue
queue = TransferQueue.open()
queue.create_table("t", Schema({"x": "int64"})).task("all", reads=("x",))
queue.serve(sys.argv[1])
print("ready", flush=True)
sys.stdin.read()
"""

CONSUMER = """
import sys
from asyncflow.storage import TransferQueue
stream = TransferQueue.open(sys.argv[1]).table("t").stream("all", rows=2, credit=2)
lease = stream.next()
print(lease.id, flush=True)
sys.stdin.read()
"""


def child(code, address):
    command = [sys.executable, "-c", code, address]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def test_a_consumer_killed_under_lease_loses_nothing(host, address):
    table = host.create_table("t", Schema({"x": "int64"}))
    table.task("all", reads=("x",), max_attempts=2)
    rows = table.put({"x": np.arange(4)})
    with child(CONSUMER, address) as consumer:
        dead = int(consumer.stdout.readline())
        consumer.send_signal(signal.SIGKILL)
    lease = table.stream("all", rows=4).next()
    assert (lease.rows.tolist(), lease.attempt) == (rows.tolist(), 2)
    with pytest.raises(LeaseLost):
        table.write(rows[:2], {"x": [0, 1]}, lease=dead)
    lease.done()
    assert table.ledger().done == 4
    assert host.status().streams == 1


def test_a_killed_server_is_a_typed_error_that_names_it(address, pool):
    with child(SERVER, address) as server:
        assert server.stdout.readline() == "ready\n"
        client = TransferQueue.open(address)
        table = client.table("t")
        wait = pool.submit(table.stream("all", rows=1).next)
        server.send_signal(signal.SIGKILL)
    assert isinstance(wait.exception(), QueueClosed)
    with pytest.raises(QueueClosed, match=f"{address} is gone"):
        table.put({"x": [1]})
    client.close()


def test_another_process_sees_the_same_errors(address):
    with child(SERVER, address) as server:
        server.stdout.readline()
        with TransferQueue.open(address) as client:
            with pytest.raises(SchemaError, match="no table 'none'"):
                client.table("none")
            assert client.table("t").put({"x": [1, 2]}).tolist() == [0, 1]
        server.stdin.close()
