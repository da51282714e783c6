"""Large batches of clients that see none of the server's memory, over plain tcp beside the control connection."""

import asyncio
import logging
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack, closing

import msgpack
import numpy as np
import pytest
import zmq
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from asyncflow.errors import StorageError, WaitTimeout, WireError
from asyncflow.storage import Batch, Schema, TransferQueue, aio, bulk, dock, kv, wire
from asyncflow.storage.arena import Window, region_of
from asyncflow.storage.bulk import HEADER, MAGIC, NO, YES
from asyncflow.storage.controller import Controller
from asyncflow.storage.depot import Depot
from asyncflow.storage.ferry import Shipped, fetchable
from asyncflow.storage.frames import ColumnLayout, Layout, Stream
from asyncflow.storage.keys import create
from asyncflow.storage.link import EmbeddedLink
from asyncflow.storage.loader import Loader
from asyncflow.storage.units import Units

KIB = 1 << 10
SCHEMA = Schema({"image": "uint8[65536]", "h": "bfloat16[1000]", "tokens": "list<int64>", "text": "string"})
NAMES = list(SCHEMA.columns)[-4:]


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    """Make little of what is large, and let nobody see the memory of others."""
    monkeypatch.setattr(Window, "visible", staticmethod(lambda *proof: False))
    monkeypatch.setattr(bulk, "LARGE", 256 * KIB)
    monkeypatch.setattr(bulk, "PART", 512 * KIB)
    monkeypatch.setattr(bulk, "CHUNK", 200 * KIB)


def cells(seed: int, rows: int = 24) -> Batch:
    draw = np.random.default_rng(seed)
    return Batch.of(
        SCHEMA,
        {
            "image": draw.integers(0, 256, (rows, 65536), np.uint8),
            "h": draw.integers(0, 1 << 16, (rows, 1000), np.uint16),
            "tokens": [draw.integers(-1 << 62, 1 << 62, n) for n in draw.integers(0, 4000, rows)],
            "text": ["é" * int(n) for n in draw.integers(0, 3000, rows)],
        },
    )


@pytest.fixture
def host():
    with TransferQueue.open() as queue:
        queue.create_table("t", SCHEMA).task("use", NAMES)
        yield queue


@pytest.fixture
def url(host):
    return host.serve("tcp://127.0.0.1:*")


def dock_of(host: TransferQueue) -> dock.Dock:
    return host._link._servers[-1]._dock


def until(true) -> None:
    end = time.monotonic() + 30
    while not true():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.mark.parametrize("units", [0, 2])
def test_large_batches_go_and_come_bit_for_bit(units):
    with ExitStack() as stack:
        holder = stack.enter_context(TransferQueue(EmbeddedLink(Controller(units=Units() if units else None))))
        served = holder.serve("tcp://127.0.0.1:*")
        for _ in range(units):
            stack.callback(Depot(served, "tcp://127.0.0.1:*", 30).close)
        client = stack.enter_context(TransferQueue.open(served))
        table = client.create_table("t", SCHEMA, replicas=max(1, units))
        table.task("use", NAMES)
        rows = [table.put(cells(seed)) for seed in (1, 2)]
        lease = table.stream("use", rows=48).next()
        assert lease.batch.select(NAMES).equals(Batch.concat([cells(1), cells(2)]))
        assert table.read(rows[0], NAMES).equals(cells(1))
        assert table.read(rows[1][::-1], NAMES).equals(cells(2).take(np.arange(24)[::-1]))
        came = region_of(table.read(rows[0], NAMES)["image"].values)
        assert came is not None
        assert not came.shared


def test_cells_stay_where_they_arrived_and_are_the_same_for_all(host, url):
    with TransferQueue.open(url) as client:
        rows = client.table("t").put(cells(1))
        held = host.table("t").read(rows, NAMES)
        assert held.equals(cells(1))
        assert region_of(held["image"].values).shared
        assert not held["image"].values.flags.writeable
        assert dock_of(host)._tokens == {}


def test_memory_is_used_again_and_no_array_changes_under_its_reader(host, url):
    with TransferQueue.open(url) as client:
        table, arena = client.table("t"), host._link._arena
        stream = table.stream("use", rows=24)
        table.put(cells(0))
        first = stream.next()
        first.done()
        for seed in range(1, 12):
            table.put(cells(seed))
            lease = stream.next()
            assert lease.batch.select(NAMES).equals(cells(seed))
            lease.done()
        assert first.batch.select(NAMES).equals(cells(0))
        assert arena.nbytes < 40 << 20
        assert client._link._ferry._arena.nbytes < 40 << 20


def test_a_put_that_is_awaited_goes_the_same_way(host, url):
    async def put() -> Batch:
        async with await aio.connect(url) as queue:
            table = await queue.table("t")
            return await table.read(await table.put(cells(3)), NAMES)

    assert asyncio.run(put()).equals(cells(3))


# Who comes without having been asked


class Session:
    """A client that says what it likes."""

    def __init__(self, url: str) -> None:
        self._context = zmq.Context()
        self._dealer = self._context.socket(zmq.DEALER)
        self._dealer.setsockopt(zmq.RCVTIMEO, 30_000)
        self._dealer.setsockopt(zmq.LINGER, 0)
        self._dealer.connect(url)
        self.port = self.ask({"kind": "hello", "protocol": wire.PROTOCOL})["bulk"]

    def ask(self, body: dict[str, object]) -> dict[str, object]:
        return self.say([msgpack.packb({"call": 1, "body": body})])

    def say(self, parts: list[bytes]) -> dict[str, object]:
        self._dealer.send_multipart(parts)
        return msgpack.unpackb(self._dealer.recv_multipart()[0])["body"]

    def reserve(self, nbytes: int = 1 << 20, parts: int = 1) -> tuple[int, bytes]:
        reply = self.ask({"kind": "reserve", "bytes": nbytes, "parts": parts})
        return reply["transfer"], reply["token"]

    def connect(self, said: bytes = b"") -> socket.socket:
        connection = socket.create_connection(("127.0.0.1", self.port), 30)
        connection.sendall(said)
        return connection

    def close(self) -> None:
        self._dealer.close()
        self._context.term()


@pytest.fixture
def session(url):
    session = Session(url)
    yield session
    session.close()


def put_of(session: Session, transfer: int) -> dict[str, object]:
    """Put 1 MiB that a transfer is said to have brought."""
    batch = Batch({"x": np.zeros((1, 1 << 20), np.uint8)})
    return session.say(wire.encode_call(1, wire.Put("b", b"1"), batch, Shipped(transfer)))


def send_all(session: Session, token: bytes) -> None:
    with session.connect(HEADER.pack(MAGIC, token, 0)) as connection:
        assert connection.recv(1) == YES
        assert bulk.send(connection, [np.zeros(1 << 20, np.uint8)], 0, 1 << 20)


def test_a_token_is_good_once_and_for_its_session_only(host, url, session):
    host.create_table("b", Schema({"x": "uint8[1048576]"}))
    transfer, token = session.reserve()
    assert "1 of 1 parts of transfer" in put_of(session, transfer)["message"]
    for wrong in (HEADER.pack(MAGIC, bytes(16), 0), HEADER.pack(MAGIC, token, 1), HEADER.pack(MAGIC, token, 1 << 31)):
        with session.connect(wrong) as connection:
            assert connection.recv(2) == NO
    send_all(session, token)
    other = Session(url)
    assert put_of(other, transfer)["error"] == "WireError"
    other.close()
    with session.connect(HEADER.pack(MAGIC, token, 0)) as connection:
        assert connection.recv(2) == NO
    assert put_of(session, transfer)["kind"] == "rows"
    assert put_of(session, transfer)["error"] == "WireError"
    assert host.table("b").ledger().admitted == 1


def test_a_transfer_that_is_not_used_expires(host, session, monkeypatch):
    monkeypatch.setattr(dock, "EXPIRY", 0.1)
    host.create_table("b", Schema({"x": "uint8[1048576]"}))
    transfer, token = session.reserve()
    until(lambda: not dock_of(host)._tokens)
    with session.connect(HEADER.pack(MAGIC, token, 0)) as connection:
        assert connection.recv(2) == NO
    assert "has expired" in put_of(session, transfer)["message"]
    assert host._link._arena.used <= 4 << 20


@pytest.mark.parametrize("claim", [(0, 1), (-64, 1), (65, 1), (1 << 62, 1), (1 << 20, 0), (1 << 20, 65), (64, -1)])
def test_a_claim_that_cannot_be_is_refused(host, session, claim):
    reply = session.ask({"kind": "reserve", "bytes": claim[0], "parts": claim[1]})
    assert reply.get("error") == "WireError" or reply["transfer"] == 0
    assert host._link._arena.used == 0


def test_a_session_has_so_much_under_way_and_no_more(host, session, monkeypatch):
    monkeypatch.setattr(bulk, "MOST", 3 << 20)
    transfers = [session.reserve()[0] for _ in range(5)]
    assert [transfer > 0 for transfer in transfers] == [True] * 3 + [False] * 2


def test_noise_harms_nobody(host, url, session):
    _, token = session.reserve()
    header = HEADER.pack(MAGIC, token, 0)

    @settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(st.binary(max_size=60) | st.binary(max_size=30).map(lambda noise: MAGIC + noise) | st.integers(0, 23))
    def noise(said):
        with session.connect(header[:said] if isinstance(said, int) else said):
            pass

    noise()
    assert host._link._arena.used <= 4 << 20
    with TransferQueue.open(url) as client:
        assert client.table("t").read(client.table("t").put(cells(1)), NAMES).equals(cells(1))
        assert client._link._bulk


def test_strangers_are_few_and_do_not_stay(host, session, monkeypatch):
    monkeypatch.setattr(dock, "STRANGERS", 4)
    silent = [session.connect(MAGIC[: number % 4]) for number in range(8)]
    for each in silent[:4]:
        assert each.recv(1) == b""
    until(lambda: len(dock_of(host)._visitors) == 4)
    monkeypatch.setattr(dock, "GREETING", 0.1)
    with session.connect(MAGIC) as late:
        assert late.recv(1) == b""
    for each in silent:
        each.close()


# Who stops in the middle


def test_a_sender_that_stalls_is_left_and_may_come_again(host, session, monkeypatch):
    monkeypatch.setattr(bulk, "SILENCE", 0.2)
    host.create_table("b", Schema({"x": "uint8[1048576]"}))
    transfer, token = session.reserve()
    with session.connect(HEADER.pack(MAGIC, token, 0) + bytes(300 * KIB)) as connection:
        assert connection.recv(1) == YES
        assert connection.recv(1) == b""
    send_all(session, token)
    assert put_of(session, transfer)["kind"] == "rows"


HALF = """
import sys, socket
from asyncflow.storage import TransferQueue, bulk, wire
from asyncflow.storage.arena import Window
Window.visible = staticmethod(lambda *proof: False)
link = TransferQueue.open(sys.argv[1])._link
room = link.send(wire.Reserve(8 << 20, 1)).result(30)[0]
connection = socket.create_connection(link._ferry._where)
connection.sendall(bulk.HEADER.pack(bulk.MAGIC, room.token, 0) + bytes(3 << 20))
print("half", flush=True)
sys.stdin.read()
"""


def test_a_sender_that_is_killed_frees_its_room(host, url):
    command = [sys.executable, "-c", HALF, url]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as sender:
        assert sender.stdout.readline() == "half\n"
        assert host._link._arena.used == 8 << 20
        sender.send_signal(signal.SIGKILL)
    until(lambda: not dock_of(host)._sessions)
    # What was left is used again with the next segment that is taken.
    until(lambda: host._link.writer().take(8 << 20) is not None and host._link._arena.used <= 8 << 20)
    with TransferQueue.open(url) as client:
        assert client.table("t").read(client.table("t").put(cells(1)), NAMES).equals(cells(1))


def test_a_put_whose_time_is_up_on_the_way_never_arrives(host, url):
    with socket.create_server(("127.0.0.1", 0)) as deaf, TransferQueue.open(url) as client:
        ferry, table = client._link._ferry, client.table("t")
        where, ferry._where = ferry._where, deaf.getsockname()
        with pytest.raises(WaitTimeout, match="bytes were still on their way"):
            table.put(cells(1), timeout=0.2)
        ferry._where = where
        table.put(cells(2))
        assert client._link._bulk
        assert host.table("t").ledger().admitted == 24


# What goes over the control connection instead


def test_a_port_that_cannot_be_reached_is_done_without(host, url, caplog):
    dock_of(host)._listener.close()
    with TransferQueue.open(url) as client:
        for seed in range(2):
            rows = client.table("t").put(cells(seed))
            assert client.table("t").read(rows, NAMES).equals(cells(seed))
    assert ["cannot be reached" in record.message for record in caplog.records] == [True]


@pytest.mark.parametrize("answers", [b"", YES, NO])
def test_what_cannot_be_moved_in_bulk_comes_all_the_same(host, url, caplog, pool, answers):
    """Both a put and a read meet a port where nothing is moved."""
    with socket.create_server(("127.0.0.1", 0)) as broken, ExitStack() as stack:

        def serve():
            while True:
                try:
                    connection, _ = broken.accept()
                except OSError:
                    return
                with connection:
                    connection.sendall(answers)

        stack.callback(broken.shutdown, socket.SHUT_RDWR)
        pool.submit(serve)
        reader, writer = (stack.enter_context(TransferQueue.open(url)) for _ in range(2))
        for each in (reader, writer):
            each._link._ferry._where = broken.getsockname()
        rows = writer.table("t").put(cells(1))
        for _ in range(2):
            assert reader.table("t").read(rows, NAMES).equals(cells(1))
    warned = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert sum("over its own port from now on" in message for message in warned) == 2
    assert dock_of(host)._tokens == {}


def test_what_is_encrypted_takes_no_other_port(host, tmp_path):
    keys = tmp_path / "keys"
    create(keys)
    with pytest.raises(StorageError, match="encrypted with keys"):
        host.serve("tcp://127.0.0.1:*", encrypt_bulk=True)
    plain = host.serve("tcp://127.0.0.1:*", keys)
    with pytest.raises(StorageError, match="encrypted with keys"):
        TransferQueue.open(plain, encrypt_bulk=True)
    served = host.serve("tcp://127.0.0.1:*", keys, encrypt_bulk=True)
    assert dock_of(host) is None
    for where, wish, moves in ((served, False, False), (plain, True, False), (plain, False, True)):
        with TransferQueue.open(where, keys=keys, encrypt_bulk=wish) as client:
            assert client._link._bulk == moves
            assert client.table("t").read(client.table("t").put(cells(1)), NAMES).equals(cells(1))


def test_every_face_of_a_queue_can_wish_for_encryption(host, tmp_path):
    keys = tmp_path / "keys"
    create(keys)
    url = host.serve("tcp://127.0.0.1:*", keys)
    kv.init(url=url, keys=keys, encrypt_bulk=True)
    with closing(kv), Loader(url, "t", "use", keys=keys, encrypt_bulk=True).open() as loading:
        awaited = asyncio.run(aio.connect(url, keys=keys, encrypt_bulk=True))
        queues = [kv.get_client().queue, loading, awaited.blocking]
        assert not any(each._link._bulk for each in queues)
        awaited.blocking.close()


# The parts themselves


@given(st.integers(1, 1 << 22), st.integers(1, bulk.MAX_PARTS))
def test_parts_follow_each_other_and_leave_nothing_out(nbytes, parts):
    at = 0
    for part in range(parts):
        start, stop = bulk.span(nbytes, parts, part)
        assert start == at <= stop
        at = stop
    assert at == nbytes


@given(st.lists(st.integers(1, 700), min_size=1, max_size=6), st.data())
def test_any_part_of_any_buffers_is_sent_as_it_lies(sizes, data):
    draw = np.random.default_rng(0)
    buffers = [draw.integers(0, 256, size, np.uint8) for size in sizes]
    laid = b"".join(buffer.tobytes() + bytes(-buffer.size % 64) for buffer in buffers)
    start = data.draw(st.integers(0, len(laid)))
    stop = data.draw(st.integers(start, len(laid)))
    assert b"".join(bulk._pieces(buffers, start, stop)) == laid[start:stop]


def test_damage_on_the_way_is_found(pool):
    ours, theirs = socket.socketpair()
    with ours, theirs:
        memory = np.zeros(300 * KIB, np.uint8)
        good = pool.submit(bulk.receive, theirs, memory.data)
        ours.sendall(bytes(memory.size) + bytes(8))
        assert good.result(30) is False


def test_an_answer_that_claims_another_stream_is_refused():
    def layout(size: int, claimed: int, parts: int = 1) -> Layout:
        return Layout(1, [ColumnLayout("x", "bytes", size)], 0, [(1, 0)], Stream(b"", claimed, parts))

    assert fetchable(layout(1 << 20, 1 << 20)).bytes == 1 << 20
    for wrong in (layout(1 << 20, 1 << 30), layout(1 << 62, 1 << 62), layout(1 << 20, 1 << 20, 0)):
        with pytest.raises(WireError, match="a stream of"):
            fetchable(wrong)
