"""Cells above a limit of memory: what moves to the disk, in which order, what comes back, and what a full disk does."""

import asyncio
import os
import re
import signal
import subprocess
import sys
import threading
import time
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncflow.errors import QueueClosed, SchemaError, StorageError, WaitTimeout
from asyncflow.storage import Batch, Schema, TransferQueue, aio, kv, sheet
from asyncflow.storage import spill as spilling
from asyncflow.storage.controller import Controller
from asyncflow.storage.depot import Depot
from asyncflow.storage.link import EmbeddedLink
from asyncflow.storage.moving import restore
from asyncflow.storage.spill import Spill, size_of
from asyncflow.storage.unit import Unit
from asyncflow.storage.units import Units
from tests.storage.mortals import PATIENCE

LIMIT = 1 << 20
COLUMNS = {
    "fixed": "float32[3]",
    "flag": "bool",
    "half": "list<bfloat16>",
    "ids": "list<int64>",
    "vectors": "list<float16[2]>",
    "text": "string",
    "raw": "bytes",
    "nested": "arrow<list<struct<role: string, n: int64>>>",
}


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "disk"


@pytest.fixture
def spill(folder):
    return lambda: Spill(LIMIT, folder)


def cells(start, count, length=1000):
    numbers = range(start, start + count)
    return {
        "fixed": np.array([[n, 0.5, -n] for n in numbers], np.float32),
        "flag": np.array([n % 2 == 0 for n in numbers]),
        "half": [np.arange(n % 5, dtype=np.uint16) for n in numbers],
        "ids": [np.full(n % 2 * length, n) for n in numbers],
        "vectors": [np.full((n % 3, 2), n, np.float16) for n in numbers],
        "text": ["é" * (n % 4) for n in numbers],
        "raw": [bytes([n % 256]) * (n % 7) for n in numbers],
        "nested": [None if n % 3 == 0 else [{"role": "user", "n": n}] * (n % 4) for n in numbers],
    }


def until(true, what="the disk"):
    end = time.monotonic() + PATIENCE
    while not true():
        assert time.monotonic() < end, f"{what} took too long"
        time.sleep(0.002)


def fill(table, batch):
    """Put until a put waits in vain."""
    while True:
        table.put(batch, timeout=1)


def memory(queue):
    return list(queue.status().memory.values())


def settled(queue):
    until(lambda: all(each.memory <= each.limit for each in memory(queue)))
    return memory(queue)


def embedded(folder, limit=LIMIT):
    return closing(TransferQueue.open(memory_limit=limit, spill=folder))


# Whole queues


def test_cells_come_back_bit_by_bit_whichever_way(queue):
    table = queue.create_table("t", Schema(COLUMNS))
    table.task("use", tuple(COLUMNS), lease_seconds=PATIENCE)
    puts = [cells(start, 60) for start in range(0, 1200, 60)]
    rows = np.concatenate([table.put(each) for each in puts])
    assert sum(each.spilled for each in settled(queue)) > LIMIT
    expected = Batch.concat([Batch.of(table.schema, each) for each in puts])
    order = np.random.default_rng(0).permutation(len(rows))[:500]
    assert table.read(rows[order], list(COLUMNS)).equals(expected.take(order))
    leases = [table.stream("use", rows=60).next(PATIENCE) for _ in puts]
    for lease in leases:
        assert lease.batch.select(COLUMNS).equals(expected.take(lease.rows - rows[0]))
        table.write(lease.rows, cells(int(lease.rows[0] - rows[0]), 60))
        lease.done()
    assert table.status().bytes == 0
    until(lambda: not any(each.memory or each.spilled for each in memory(queue)))


def test_a_producer_that_nobody_follows_fills_the_disk_and_not_the_memory(queue):
    table = queue.create_table("t", Schema({"x": "list<int64>"}))
    highest = 0
    for start in range(120):
        table.put({"x": [np.full(10_000, start)]}, timeout=PATIENCE)
        highest = max([highest, *(each.memory for each in memory(queue))])
    assert table.status().bytes > 9 * LIMIT
    # As far as units have told: what they have written meanwhile is counted a little later.
    assert highest <= LIMIT + LIMIT // 4 + 200_000
    assert sum(each.spilled for each in settled(queue)) > 7 * LIMIT
    assert table.read([7, 119], ["x"])["x"].values[::10_000].tolist() == [7, 119]


def test_what_is_held_stays_as_it_was_when_its_rows_have_gone(folder):
    with embedded(folder) as queue:
        table = queue.create_table("t", Schema({"x": "list<int64>"}))
        rows = [table.put({"x": [np.full(40_000, number)]}) for number in range(10)]
        before = [table.read(each, ["x"]) for each in rows]
        settled(queue)
        after = [table.read(each, ["x"]) for each in rows]
        table.drop(np.concatenate(rows), "enough")
        assert (table.status().bytes, table.status().spilled) == (0, 0)
    for number, held in enumerate(zip(before, after, strict=True)):
        assert all((each["x"].values == number).all() for each in held)


def test_a_snapshot_of_spilled_tables_is_restored_within_the_limit(queue, folder, tmp_path):
    table = queue.create_table("t", Schema(COLUMNS))
    rows = np.concatenate([table.put(cells(start, 60)) for start in range(0, 1200, 60)])
    settled(queue)
    queue.snapshot(tmp_path / "saved")
    expected = table.read(rows, list(COLUMNS))
    with closing(TransferQueue.restore(tmp_path / "saved", LIMIT, folder)) as restored:
        (kept,) = settled(restored)
        assert kept.spilled > LIMIT
        assert restored.table("t").read(rows, list(COLUMNS)).equals(expected)


def test_a_snapshot_is_spread_over_units_within_their_limits(folder, tmp_path):
    with closing(TransferQueue.open()) as queue:
        rows = [queue.create_table("t", Schema(COLUMNS)).put(cells(start, 60)) for start in range(0, 1200, 60)]
        queue.snapshot(tmp_path / "saved")
        expected = queue.table("t").read(np.concatenate(rows), list(COLUMNS))
    units = Units()
    controller = Controller(units=units)
    with closing(TransferQueue(EmbeddedLink(controller))) as host:
        url = host.serve(f"ipc://{tmp_path}/queue")
        with closing(Depot(url, f"{url}.0", PATIENCE, spill=Spill(LIMIT, folder))):
            restore(controller, units, tmp_path / "saved")
            with closing(TransferQueue.open(url)) as queue:
                (kept,) = settled(queue)
                assert kept.spilled > LIMIT
                assert kept.spilled + kept.memory == queue.table("t").status().bytes
                assert queue.table("t").read(np.concatenate(rows), list(COLUMNS)).equals(expected)


def test_a_journal_with_more_than_the_limit_is_gone_on_with(folder, tmp_path):
    options = {"durability": "journal", "folder": tmp_path / "log", "memory_limit": LIMIT, "spill": folder}
    with closing(TransferQueue.open(**options)) as queue:
        table = queue.create_table("t", Schema({"x": "list<int64>"}))
        for number in range(30):
            table.put({"x": [np.full(10_000, number)]}, timeout=PATIENCE)
    with closing(TransferQueue.open(**options)) as queue:
        (kept,) = settled(queue)
        assert kept.spilled > LIMIT
        assert queue.table("t").read(np.arange(30), ["x"])["x"].values[::10_000].tolist() == list(range(30))


def test_a_table_that_is_dropped_leaves_the_disk(queue):
    table = queue.create_table("t", Schema({"x": "list<int64>"}))
    for number in range(40):
        table.put({"x": [np.full(10_000, number)]}, timeout=PATIENCE)
    assert sum(each.spilled for each in settled(queue)) > 0
    queue.drop_table("t")
    until(lambda: not any(each.spilled for each in memory(queue)))


# A disk that is full


def test_puts_wait_while_the_disk_cannot_be_written(queue, folder, pool, caplog):
    table = queue.create_table("t", Schema({"x": "list<int64>"}))
    folder.rmdir()
    put = {"x": [np.zeros(10_000, np.int64)]}
    first, said = until_full(table, put)
    assert re.search("bytes of memory are used, and the disk at .*/disk cannot be written: .*No such file", said), said
    assert any(each.trouble for each in memory(queue))
    waiting = [pool.submit(table.put, put, timeout=PATIENCE) for _ in range(4)]
    assert table.read(first[:1], ["x"])["x"].lengths.tolist() == [10_000]
    table.drop(first, "make room")
    assert len({row for each in waiting for row in each.result(PATIENCE).tolist()}) == 4
    warnings = [record.message for record in caplog.records if "cannot be written" in record.message]
    assert 1 <= len(warnings) <= len(memory(queue))


def until_full(table, put):
    rows = []
    while True:
        try:
            rows.append(table.put(put, timeout=2))
        except WaitTimeout as error:
            return np.concatenate(rows), str(error)


def test_a_disk_that_is_back_is_used_again(folder, pool, monkeypatch):
    monkeypatch.setattr(spilling, "_RETRY", 0.05)
    with embedded(folder) as queue:
        table = queue.create_table("t", Schema({"x": "list<int64>"}))
        folder.rmdir()
        waiting = [pool.submit(table.put, {"x": [np.zeros(40_000, np.int64)]}, timeout=PATIENCE) for _ in range(8)]
        until(lambda: memory(queue)[0].trouble)
        folder.mkdir()
        assert sorted(int(each.result(PATIENCE)[0]) for each in waiting) == list(range(8))
        (kept,) = settled(queue)
        assert (kept.spilled > 0, kept.trouble) == (True, "")


def test_a_file_that_may_not_grow_is_a_disk_that_is_full(folder):
    code = f"""
import resource, numpy as np
from asyncflow.errors import WaitTimeout
from asyncflow.storage import Schema, TransferQueue
queue = TransferQueue.open(memory_limit={LIMIT}, spill={str(folder)!r})
table = queue.create_table("t", Schema({{"x": "list<int64>"}}))
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
try:
    while True:
        table.put({{"x": [np.ones(40_000, np.int64)]}}, timeout=1)
except WaitTimeout as error:
    print(error)
rows = table.find().rows
print(int(sum(table.read(rows, ["x"])["x"].values)) == 40_000 * len(rows), table.status().spilled)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE, check=True)
    assert "cannot be written: [Errno 27] File too large" in done.stdout
    assert done.stdout.splitlines()[-1] == "True 0"
    assert list(folder.iterdir()) == []


def test_a_put_that_waits_for_memory_ends_with_its_table(queue, folder, pool):
    table = queue.create_table("t", Schema({"x": "list<int64>"}))
    folder.rmdir()
    full = {"x": [np.zeros(50_000, np.int64)]}
    with pytest.raises(WaitTimeout, match="cannot be written"):
        fill(table, full)
    waiting = [pool.submit(table.put, full, timeout=PATIENCE) for _ in range(4)]
    queue.drop_table("t")
    # One that came after the end of the table finds none.
    assert {type(each.exception(PATIENCE)) for each in waiting} <= {QueueClosed, SchemaError}


def test_every_face_of_a_queue_can_have_a_limit(folder):
    limits = {"memory_limit": LIMIT, "spill": folder}
    kv.init(**limits)
    with closing(kv), asyncio.run(aio.connect("embedded://", **limits)).blocking as awaited:
        assert [memory(queue)[0].limit for queue in (kv.get_client().queue, awaited)] == [LIMIT, LIMIT]


@pytest.mark.parametrize("nameless", [True, False])
def test_a_killed_process_leaves_nothing(folder, nameless):
    code = f"""
import os, time, numpy as np
from asyncflow.storage import Schema, TransferQueue
if not {nameless}:
    os.O_TMPFILE = os.O_DIRECTORY | os.O_WRONLY  # as if the file system had no such files
queue = TransferQueue.open(memory_limit={LIMIT}, spill={str(folder)!r})
table = queue.create_table("t", Schema({{"x": "list<int64>"}}))
for _ in range(20):
    table.put({{"x": [np.ones(40_000, np.int64)]}})
print(table.status().spilled, flush=True)
time.sleep(1000)
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        assert int(process.stdout.readline()) > 0
        process.send_signal(signal.SIGKILL)
        assert process.wait(PATIENCE) == -signal.SIGKILL
    if not nameless:
        sheet.check(folder)  # as the next process does
    assert list(folder.iterdir()) == []


# What is chosen


@pytest.mark.parametrize(
    ("limit", "spill_to", "said"),
    [(None, "x", "memory limit"), (10, None, "needs a folder"), (0, "x", "at least 1 byte"), (10, "f/x", "f/x: ")],
)
def test_a_choice_that_cannot_be_is_refused(tmp_path, monkeypatch, limit, spill_to, said):
    monkeypatch.chdir(tmp_path)
    Path("f").touch()
    with pytest.raises(StorageError, match=said):
        TransferQueue.open(memory_limit=limit, spill=spill_to)


def test_a_client_does_not_choose(tmp_path):
    with pytest.raises(StorageError, match="another process, which chooses its memory limit"):
        TransferQueue.open(f"ipc://{tmp_path}/queue", memory_limit=10, spill=tmp_path)


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("8GiB", 8 << 30), ("1.5 MB", 1_500_000), ("12", 12), ("3k", 3000), ("2TiB", 2 << 40), ("7B", 7)],
)
def test_sizes_are_read_as_people_write_them(text, nbytes):
    assert size_of(text) == nbytes


@pytest.mark.parametrize("text", ["", "GiB", "-3", "8 giga", "8GiBs", "1e9"])
def test_other_sizes_are_refused(text):
    with pytest.raises(StorageError, match="no number of bytes"):
        size_of(text)


# Blocks, without a thread


def block(number, count=1):
    return Batch({"x": np.full((count, 100), number), "l": [np.full(number % 4, number)] * count})


def filled(unit, numbers):
    for number in numbers:
        unit.reach(number + 1)
        unit.put(np.array([number]), block(number))


def on_disk(unit):
    rows = np.array(sorted({row for each in unit.blocks() for row in each.rows.tolist()}))
    return [row for row in rows.tolist() if unit.locate(np.array([row]), ["x"]).spilled]


def test_copies_go_first_then_what_was_read_then_what_came_last(folder):
    store = Spill(1 << 20, folder)
    unit, copies = Unit(["x", "l"], keeper=store), Unit(["x", "l"], keeper=store, spare=True)
    filled(unit, range(6))
    filled(copies, range(100, 102))
    unit.gather(np.array([3]), ["x"])
    unit.gather(np.array([1]), ["x"])
    assert [int(each.rows[0]) for each, _ in store._order()] == [100, 101, 3, 1, 5, 4, 2, 0]
    store.limit = store.memory - 1
    store._move(store._choose())
    assert on_disk(copies) == [100, 101]
    assert on_disk(unit) == []


def test_many_little_blocks_share_files_mappings_and_blocks(folder):
    store = Spill(50_000, folder)
    unit = Unit(["x", "l"], keeper=store)
    filled(unit, range(1000))
    assert store.memory <= 50_000 < unit.spilled
    assert store.memory + store.spilled == unit.nbytes
    assert len(unit.blocks()) < 250
    assert len(_mapped(folder)) < 150
    rows = np.arange(1000)[::-7]
    assert unit.gather(rows, ["l", "x"]).equals(Batch.concat([block(row) for row in rows.tolist()]).select(["l", "x"]))
    unit.free(np.arange(1000))
    assert (store.memory, store.spilled, unit.nbytes, unit.spilled) == (0, 0, 0, 0)
    assert _mapped(folder) == []


def _mapped(folder):
    return [line for line in Path("/proc/self/maps").read_text().splitlines() if str(folder) in line]


def test_a_file_that_is_hardly_needed_is_written_anew(folder):
    store = Spill(1, folder)
    unit, other = Unit(["x", "l"], keeper=store), Unit(["x", "l"], keeper=store)
    store.limit = 1 << 20
    filled(unit, range(40))
    filled(other, range(40))
    store.limit = 1
    store._move(store._choose())
    (mapping,) = _mapped(folder)
    unit.free(np.arange(40))
    other.free(np.arange(1, 40))
    while moves := store._choose():
        store._move(moves)
    (smaller,) = _mapped(folder)
    assert _extent(smaller) < _extent(mapping) / 8
    assert other.nbytes == store.spilled == block(0).nbytes
    assert other.gather(np.array([0]), ["x", "l"]).equals(block(0))


def _extent(mapping):
    start, stop = (int(edge, 16) for edge in mapping.split()[0].split("-"))
    return stop - start


def test_rows_that_go_while_their_blocks_are_written_stay_gone(folder):
    store = Spill(1 << 20, folder)
    unit = Unit(["x", "l"], keeper=store)
    filled(unit, range(10))
    store.limit = 1
    moves = store._choose()
    unit.free(np.array([0, 3, 9]))
    unit.forget(1)
    store._move(moves)
    left = np.array([8, 1, 2, 4, 5, 6, 7])
    assert unit.gather(left, ["x", "l"]).equals(Batch.concat([block(row) for row in left.tolist()]))
    unit.free(left)
    assert (store.memory, store.spilled, unit.nbytes) == (0, 0, 0)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(1, 5), min_size=1, max_size=12), st.integers(1, 8000), st.data())
def test_any_order_of_use_leaves_what_was_put(tmp_path_factory, sizes, limit, data):
    store = Spill(limit, tmp_path_factory.getbasetemp() / "any")
    unit, model, start = Unit(["x", "l"], keeper=store), {}, 0
    for size in sizes:
        unit.admit(size)
        unit.put(np.arange(start, start + size), block(start, size))
        model.update(dict.fromkeys(range(start, start + size), start))
        start += size
        for row in data.draw(st.lists(st.sampled_from(sorted(model)), unique=True, max_size=4)) if model else ():
            unit.free(np.array([row]))
            del model[row]
        while moves := store._choose():
            store._move(moves)
        assert store.memory <= limit
        assert (store.memory + store.spilled, store.spilled) == (unit.nbytes, unit.spilled)
        if model:
            rows = np.array(data.draw(st.lists(st.sampled_from(sorted(model)), min_size=1, max_size=8)))
            expected = Batch.concat([block(model[row]) for row in rows.tolist()])
            assert unit.gather(rows, ["x", "l"]).equals(expected)
    unit.clear()
    assert (store.memory, store.spilled) == (0, 0)


def test_a_large_block_is_written_anew_piece_by_piece(folder, monkeypatch):
    monkeypatch.setattr(spilling, "PIECE", 10_000)
    store = Spill(1, folder)
    unit = Unit(["x", "l"], keeper=store)
    unit.admit(1000)
    batch = Batch({"x": np.arange(3000).reshape(1000, 3), "l": [np.arange(row % 5) for row in range(1000)]})
    unit.put(np.arange(1000), batch)
    unit.free(np.setdiff1d(np.arange(1000), np.arange(0, 1000, 3)))
    while moves := store._choose():
        store._move(moves)
    rows = np.arange(0, 1000, 3)
    assert unit.nbytes < batch.nbytes * 0.4
    assert unit.saved > batch.nbytes * 0.6
    assert unit.gather(rows, ["x", "l"]).equals(batch.take(rows))


def test_a_file_has_no_name_even_where_all_have_one(folder, monkeypatch):
    monkeypatch.setattr(os, "O_TMPFILE", os.O_DIRECTORY | os.O_WRONLY)  # as if the file system had none
    sheet.check(folder)
    store = Spill(1, folder)
    unit = Unit(["x", "l"], keeper=store)
    filled(unit, range(3))
    assert on_disk(unit) == [0, 1, 2]
    assert list(folder.iterdir()) == []


def test_nothing_is_left_running(folder):
    before = threading.active_count()
    with embedded(folder) as queue:
        queue.create_table("t", Schema({"x": "int64"})).put({"x": [1]})
        assert threading.active_count() > before
    assert threading.active_count() == before
