"""Large cells pass between processes of one host through memory that both map."""

import gc
import multiprocessing
import os
import time

import numpy as np
import pytest

from asyncflow.errors import SchemaError, StorageError
from asyncflow.storage import Schema, TransferQueue, link, remote
from asyncflow.storage.arena import FOLDER, Window, region_of

SCHEMA = Schema({"image": "uint8[65536]", "tokens": "list<int64>", "reward": "float64"})
ROWS = 16


def cells(seed: int, rows: int = ROWS) -> dict[str, object]:
    rng = np.random.default_rng(seed)
    return {
        "image": rng.integers(0, 255, (rows, 65536), np.uint8),
        "tokens": [rng.integers(0, 9, 1000) for _ in range(rows)],
        "reward": rng.random(rows),
    }


def same(batch, wanted: dict[str, object]) -> bool:
    return (
        np.array_equal(batch["image"].array, wanted["image"])
        and all(np.array_equal(ours, theirs) for ours, theirs in zip(batch["tokens"], wanted["tokens"], strict=True))
        and np.array_equal(batch["reward"].array, wanted["reward"])
    )


@pytest.fixture(params=["ipc", "tcp"])
def served(request, tmp_path):
    queue = TransferQueue.open()
    table = queue.create_table("t", SCHEMA)
    table.task("use", ["image", "tokens", "reward"])
    url = queue.serve(f"ipc://{tmp_path}/q" if request.param == "ipc" else "tcp://127.0.0.1:0")
    yield queue, url
    queue.close()
    assert list(FOLDER.glob(f"asyncflow-{queue._link._arena.name}*")) == []


def test_large_cells_are_views_of_memory_that_the_writer_filled(served):
    queue, url = served
    with TransferQueue.open(url) as producer, TransferQueue.open(url) as consumer:
        producer.table("t").put(cells(1))
        lease = consumer.table("t").stream("use", rows=ROWS).next()
        assert same(lease.batch, cells(1))
        assert region_of(lease.batch["image"].array) is not None
        assert region_of(lease.batch["reward"].array) is None  # a few bytes come with the message
        written = queue.table("t").read(lease.rows, ["image"])["image"].array
        assert region_of(written).segment == region_of(lease.batch["image"].array).segment


def test_memory_does_not_grow_and_no_array_changes_under_its_reader(served):
    queue, url = served
    arena = queue._link._arena
    with TransferQueue.open(url) as producer, TransferQueue.open(url) as consumer:
        table, stream = producer.table("t"), consumer.table("t").stream("use", rows=ROWS)
        table.put(cells(0))
        first = stream.next()
        first.done()
        for seed in range(1, 40):
            table.put(cells(seed))
            lease = stream.next()
            assert same(lease.batch, cells(seed))
            lease.done()
        assert same(first.batch, cells(0))
        assert arena.nbytes < 40 << 20
        assert queue.status().tables["t"].bytes == 0


def test_rows_that_lie_apart_are_gathered_into_memory_of_the_same_kind(served):
    _, url = served
    with TransferQueue.open(url) as client:
        table = client.table("t")
        rows = table.put(cells(1))
        mixed = rows[[5, 0, 9, 2]]
        batch = table.read(mixed, ["image"])
        assert np.array_equal(batch["image"].array, cells(1)["image"][[5, 0, 9, 2]])
        assert region_of(batch["image"].array) is not None


def test_cells_written_in_place_are_put_without_a_copy(served):
    queue, url = served
    with TransferQueue.open(url) as client:
        for table in (client.table("t"), queue.table("t")):
            wanted = cells(3)
            lengths = np.array([len(cell) for cell in wanted["tokens"]])
            room = table.room({"image": ROWS, "tokens": lengths, "reward": ROWS})
            room["image"][:] = wanted["image"]
            room["tokens"][:] = np.concatenate(wanted["tokens"])
            room["reward"][:] = wanted["reward"]
            rows = table.put(room.batch())
            seen = queue.table("t").read(rows, ["image", "tokens", "reward"])
            assert same(seen, wanted)
            assert region_of(seen["image"].array).segment == region_of(room["image"]).segment
            assert region_of(seen["image"].array).offset == region_of(room["image"]).offset


@pytest.mark.parametrize(
    "cells_of",
    [
        {"image": np.array([1, 2])},
        {"tokens": 4},
        {"reward": [1, 2]},
        {"reward": -1},
        {"tokens": np.array([3, -1])},
        {"tokens": np.array([1.5])},
        {"tokens": np.array([[1, 2]])},
    ],
)
def test_room_is_asked_for_as_the_column_is(served, cells_of):
    with pytest.raises(SchemaError, match="expected"):
        served[0].table("t").room(cells_of)


def test_a_client_that_cannot_map_gets_the_same_over_the_socket(served, monkeypatch):
    monkeypatch.setattr(Window, "visible", staticmethod(lambda *proof: False))
    _, url = served
    with TransferQueue.open(url) as client:
        rows = client.table("t").put(cells(1))
        batch = client.table("t").read(rows, ["image", "tokens", "reward"])
        assert same(batch, cells(1))
        assert region_of(batch["image"].array) is None


def _put_and_hang(url: str, connection) -> None:
    queue = TransferQueue.open(url)
    rows = queue.table("t").put(cells(5))
    held = queue.table("t").read(rows, ["image"])
    connection.send(rows.tolist())
    connection.recv()
    del held


def test_what_a_killed_producer_put_stays_as_it_was(served):
    queue, url = served
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_put_and_hang, args=(url, theirs), daemon=True)
    process.start()
    rows = ours.recv()
    process.kill()
    process.join()
    table = queue.table("t")
    with TransferQueue.open(url) as other:
        for seed in range(6, 12):
            other.table("t").put(cells(seed))
        assert same(table.read(rows, ["image", "tokens", "reward"]), cells(5))
        table.drop(rows, "over")
        gc.collect()
        assert same(other.table("t").read(other.table("t").put(cells(13)), ["image", "tokens", "reward"]), cells(13))


def test_a_grant_that_comes_too_late_costs_a_put_nothing_and_is_given_back(served, monkeypatch):
    queue, url = served
    arena = queue._link._arena
    grant = arena.grant

    def late(nbytes, left, session):
        time.sleep(0.5)
        return grant(nbytes, left, session)

    for module in (link, remote):
        monkeypatch.setattr(module, "GRACE", 0.05)
    with TransferQueue.open(url) as client:
        table = client.table("t")
        with monkeypatch.context() as patch:
            patch.setattr(arena, "grant", late)
            pending = table.send_put(cells(1))
            assert pending.wait(30)
        monkeypatch.setattr(remote, "GRACE", 30)
        client.status()
        first = arena.used
        rows = table.put(cells(2))
        assert arena.used == first
        assert same(table.read(rows, ["image", "tokens", "reward"]), cells(2))


def test_bounds_that_a_client_changes_after_a_put_are_not_believed(served):
    queue, url = served
    queue.create_table("ragged", Schema({"tokens": "list<uint8>"}))
    with TransferQueue.open(url) as client:
        table = client.table("ragged")
        lengths = np.full(10_000, 16)
        room = table.room({"tokens": lengths})
        room["tokens"][:] = 7
        rows = table.put(room.batch())
        for slab in client._link._window._slabs.values():
            if not np.frombuffer(slab.mapping, np.uint8).flags.writeable:
                continue
            np.frombuffer(slab.mapping, np.uint8)[:] = 255
        batch = table.read(rows[::-3], ["tokens"])
        assert set(batch["tokens"].lengths.tolist()) == {16}
        assert queue.table("ragged").read(rows, ["tokens"])["tokens"].lengths.sum() == 160_000


def test_a_client_that_a_forked_process_inherits_says_so(served):
    _, url = served
    with TransferQueue.open(url) as client:
        child = os.fork()
        if child == 0:
            try:
                client.status()
            except StorageError as error:
                client.close()
                os._exit(0 if "forked" in str(error) else 2)
            os._exit(1)
        assert os.waitpid(child, 0)[1] == 0
        assert client.status().clients == 1


def test_memory_of_cells_that_are_gone_waits_for_no_garbage_collector():
    gc.disable()
    try:
        with TransferQueue.open() as queue:
            table = queue.create_table("t", SCHEMA)
            table.task("use", ["image"])
            stream = table.stream("use", rows=64)
            for seed in range(10):
                table.put({"image": np.full((64, 65536), seed, np.uint8)})
                stream.next().done()
            assert queue._link._arena.used <= 12 << 20
    finally:
        gc.enable()
