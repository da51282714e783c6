"""A queue whose cells are on several storage units: threads where nothing dies, processes where something does."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import numpy as np
import pytest

from asyncflow.errors import CellConflict, QueueClosed, SchemaError, StorageError, WaitTimeout
from asyncflow.storage import Schema, TransferQueue, aio, wire
from asyncflow.storage.controller import Controller
from asyncflow.storage.depot import Depot
from asyncflow.storage.host import Host
from asyncflow.storage.link import EmbeddedLink
from asyncflow.storage.moving import restore
from asyncflow.storage.orders import Attach, Stage
from asyncflow.storage.units import Units
from tests.storage import mortals

COLUMNS = {"prompt": "list<int64>", "answer": "string", "score": "float32"}


@contextmanager
def placed(folder, count=2, recompute=None, snapshot=None):
    """Serve a queue with so many units, as threads; yield it, the units and the controller."""
    units = Units(recompute)
    controller = Controller(units=units)
    with ExitStack() as stack:
        host = stack.enter_context(TransferQueue(EmbeddedLink(controller)))
        url = host.serve(f"ipc://{folder}/queue")
        depots = [Depot(url, f"ipc://{folder}/unit{number}", 30) for number in range(count)]
        for depot in depots:
            stack.callback(depot.close)
        if snapshot is not None:
            restore(controller, units, snapshot)
        yield stack.enter_context(TransferQueue.open(url)), depots, controller


def prompts(*lengths):
    return {"prompt": [np.arange(length) for length in lengths]}


def test_puts_go_where_least_is_held(tmp_path):
    with placed(tmp_path, 3) as (queue, depots, _):
        table = queue.create_table("t", Schema(COLUMNS))
        for _ in range(12):
            table.put(prompts(1000, 1000))
        held = queue.status().units
        assert set(held) == {depot.url for depot in depots}
        assert max(held.values()) == min(held.values()) > 0
        assert sum(held.values()) == table.status().bytes


def test_a_batch_of_several_units_is_in_the_order_of_its_rows(tmp_path):
    with placed(tmp_path, 3) as (queue, *_):
        table = queue.create_table("t", Schema(COLUMNS))
        table.task("all", ("prompt",))
        rows = np.concatenate([table.put(prompts(*range(first, first + 4))) for first in range(0, 24, 4)])
        lease = table.stream("all", rows=24).next()
        assert lease.batch["prompt"].lengths.tolist() == list(range(24))
        assert table.read(rows[[20, 3, 9, 3]], ["prompt"])["prompt"].lengths.tolist() == [20, 3, 9, 3]
        table.write(rows[::-1], {"answer": [str(row) for row in rows[::-1]]}, lease)
        assert table.read(rows, ["answer"])["answer"].strings() == [str(row) for row in rows]


def test_a_write_to_several_units_is_whole_or_not_at_all(tmp_path):
    with placed(tmp_path) as (queue, *_):
        table = queue.create_table("t", Schema(COLUMNS))
        table.task("score", ("answer",))
        rows = np.concatenate([table.put(prompts(500)), table.put(prompts(500))])
        table.write(rows[:1], {"answer": ["mine"]})
        with pytest.raises(CellConflict, match="row 0 has another value of 'answer'"):
            table.write(rows, {"answer": ["other", "new"]})
        assert table.status().tasks["score"].waiting == 1
        table.write(rows, {"answer": ["mine", "new"]})
        assert table.read(rows, ["answer"])["answer"].strings() == ["mine", "new"]


def test_of_writes_at_once_to_the_same_cells_one_is_kept(tmp_path):
    with placed(tmp_path) as (queue, *_), ThreadPoolExecutor(8) as pool:
        table = queue.create_table("t", Schema(COLUMNS))
        for _ in range(10):
            rows = np.concatenate([table.put(prompts(100)) for _ in range(4)])
            calls = [pool.submit(table.write, rows, {"answer": [str(value)] * 4}) for value in range(8)]
            failed = [call.exception() for call in calls]
            kept = table.read(rows, ["answer"])["answer"].strings()
            assert kept == [str(failed.index(None))] * 4
            assert sum(error is None for error in failed) == 1
            assert all(isinstance(error, CellConflict) for error in failed if error is not None)


@pytest.mark.parametrize("count", [1, 3])
def test_a_snapshot_comes_back_on_another_number_of_units(tmp_path, count):
    (tmp_path / "a").mkdir(), (tmp_path / "b").mkdir()
    with placed(tmp_path / "a", 2) as (queue, *_):
        table = queue.create_table("t", Schema(COLUMNS))
        table.task("judge", ("prompt",), "token_balanced", tokens="prompt", budget=10_000)
        rows = np.concatenate([table.put(prompts(*range(1 + at, 9 + at)), repeat=2) for at in range(6)])
        table.write(rows[::3], {"answer": [str(row) for row in rows[::3]]})
        table.drop(rows[10:14], "gone")
        queue.snapshot(tmp_path / "saved")
    with placed(tmp_path / "b", count, snapshot=tmp_path / "saved") as (queue, *_):
        table = queue.table("t")
        left = np.setdiff1d(rows, rows[10:14])
        lengths = np.repeat(np.concatenate([np.arange(1 + at, 9 + at) for at in range(6)]), 2)
        assert table.read(left, ["prompt"])["prompt"].lengths.tolist() == lengths[left].tolist()
        written = np.intersect1d(left, rows[::3])
        assert table.read(written, ["answer"])["answer"].strings() == [str(row) for row in written]
        held = queue.status().units
        assert len(held) == count
        assert min(held.values()) > 0.5 * max(held.values())
        stream = table.stream("judge", rows=len(left), ranks=1)
        assert sorted(stream.next().rows.tolist()) == left.tolist()
        assert table.put(prompts(1)).tolist() == [len(rows)]
        table.drop(table.find().rows, "over")
        assert table.status().bytes == 0


def test_a_write_that_was_taken_back_is_forgotten(tmp_path):
    with placed(tmp_path, 1) as (queue, _, controller):
        table, desk = queue.create_table("t", Schema(COLUMNS)), controller._desks["t"]
        rows, cells = wire.pack(table.put(prompts(5))), table._batch({"answer": ["x"]})
        unit = queue._link._roster.link(1)
        half = unit.send(Stage("t", rows, b"half", 2), cells)
        mortals.until(lambda: desk._writes)
        with pytest.raises(WaitTimeout):
            half.result(0)
        unit.send(Stage("t", rows, b"whole", 1), cells).result(30)
        assert desk._writes == {}


def test_only_units_speak_for_units(tmp_path):
    with placed(tmp_path) as (queue, depots, _), TransferQueue.open(depots[0].url) as unit:
        table = queue.create_table("t", Schema(COLUMNS))
        with pytest.raises(StorageError, match="ask the controller"):
            unit.status()
        stage = Stage("t", wire.pack(np.array([5])), b"w", 1)
        with pytest.raises(StorageError, match="row 5"):
            unit._link.send(stage, table._batch({"answer": ["x"]})).result(30)
    with TransferQueue.open() as queue, pytest.raises(StorageError, match="no storage units"):
        queue._link.send(Attach("ipc:///nowhere")).result(30)


# Death


def units_of(url):
    """Return the processes that are units of the queue at an address, by their own."""
    found = {}
    for process in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            words = process.read_bytes().decode().split("\0")
            if "unit" in words and url in words:
                found[words[-2]] = int(process.parent.name)
    return found


def killed(queue, url):
    """Kill the unit at an address, and wait until the queue has seen it."""
    os.kill(units_of(queue.url)[url], signal.SIGKILL)
    while url in queue.status().units:
        time.sleep(0.01)


def settled(table):
    counts = table.ledger()
    assert counts.admitted == counts.done + counts.live + sum(counts.dropped.values())
    return counts


def test_rows_of_a_unit_that_is_killed_are_told_and_the_queue_goes_on(tmp_path):
    with Host(f"ipc://{tmp_path}/queue", 2) as host, TransferQueue.open(host.url) as queue:
        table = queue.create_table("t", Schema(COLUMNS))
        table.task("all", ("prompt",))
        for _ in range(8):
            table.put(prompts(*[100] * 5))
        stream = table.stream("all", rows=5)
        first = stream.next()
        victim = next(iter(queue.status().units))
        killed(queue, victim)
        lost = settled(table).dropped["unit_lost"]
        assert lost == 20
        first.done()
        while len(queue.status().units) < 2:
            time.sleep(0.05)
        for _ in range(4):
            table.put(prompts(*[100] * 5))
        table.seal()
        for lease in stream:
            assert lease.batch["prompt"].lengths.tolist() == [100] * len(lease)
            lease.done()
        assert settled(table).live == 0
        assert settled(table).done == 60 - lost
        assert table.status().bytes == 0


def produced(table, rows, lease=None):
    table.write(rows, {"prompt": [np.full(3, row) for row in rows]}, lease)


def answered(lease, table):
    table.write(lease.rows, {"answer": ["x"] * len(lease)}, lease)


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("moment", ["unread", "leased", "judged", "trained"])
def test_rows_of_a_unit_that_dies_are_made_anew(tmp_path, moment, victim):
    with placed(tmp_path, recompute=lambda table, columns: ["source", "rollout"]) as (queue, depots, _):
        table = queue.create_table("t", Schema(COLUMNS))
        table.task("source", (), repairs=True)
        table.task("rollout", ("prompt",))
        table.task("train", ("prompt", "answer"), durable=True)
        for at in range(4):
            table.put({"prompt": [np.full(3, 2 * at), np.full(3, 2 * at + 1)], "prompt_id": [7, 8]})
        table.seal()
        source, rollout, train = (table.stream(name, rows=2, partial=True) for name in ("source", "rollout", "train"))
        held = rollout.next() if moment != "unread" else None
        if moment in ("judged", "trained"):
            table.write(held.rows, {"answer": list("xx")}, held)
            held.done()
        if moment == "trained":
            train.next().done(0)
        depots[victim].close()
        while len(queue.status().units) > 1:
            time.sleep(0.01)
        if moment == "leased":
            held.release()
        if moment == "trained":
            table.rewind("train", -1)
        while (lease := repaired(table, source)) is not None:
            assert set(lease.batch["prompt_id"].array.tolist()) <= {7, 8}
            produced(table, lease.rows, lease)
            lease.done()
        rolled = drained(rollout, lambda lease: answered(lease, table))
        assert moment not in ("unread", "leased") or sorted(rolled) == list(range(8))
        assert sorted(drained(train, lambda lease: None, step=1)) == list(range(8))
        table.commit("train", 1)
        counts = settled(table)
        assert (counts.done, counts.live, counts.dropped) == (8, 0, {})


def repaired(table, stream):
    return stream.next() if table.status().tasks["source"].waiting else None


def drained(stream, work, step=None):
    seen = []
    while (lease := stream.next(timeout=20)) is not None:
        for row, cell in zip(lease.rows.tolist(), lease.batch["prompt"], strict=True):
            assert cell.tolist() == [row] * 3
        work(lease)
        lease.done(step)
        seen += lease.rows.tolist()
    return seen


def test_rows_wait_for_a_unit_where_the_last_one_has_died(tmp_path):
    with placed(tmp_path, 1, recompute=lambda table, columns: ["source"]) as (queue, depots, _):
        table = queue.create_table("t", Schema(COLUMNS))
        table.task("source", (), repairs=True)
        table.task("train", ("prompt",))
        rows = table.put(prompts(3, 3))
        depots[0].close()
        while queue.status().units:
            time.sleep(0.01)
        with pytest.raises(QueueClosed, match="none of its storage units can be reached"):
            table.put(prompts(1), timeout=2)
        other = Depot(queue.url, f"ipc://{tmp_path}/other", 30)
        lease = table.stream("source", rows=2).next()
        produced(table, lease.rows, lease)
        lease.done()
        assert table.read(rows, ["prompt"])["prompt"].lengths.tolist() == [3, 3]
        other.close()


def test_units_and_clients_end_when_the_controller_is_killed(tmp_path):
    url = f"ipc://{tmp_path}/queue"
    command = [sys.executable, "-m", "asyncflow", "storage", "start", "--url", url, "--units", "2"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline().strip() == url
        with TransferQueue.open(url) as queue:
            table = queue.create_table("t", Schema(COLUMNS))
            table.task("all", ("prompt",))
            table.put(prompts(1))
            process.kill()
            with pytest.raises(QueueClosed):
                table.stream("all", rows=2).next(timeout=30)
    while units_of(url):
        time.sleep(0.05)


def test_a_unit_that_had_none_of_the_rows_that_went_goes_on(tmp_path):
    with placed(tmp_path) as (queue, depots, _):
        table = queue.create_table("t", Schema(COLUMNS))
        depots[0].close()
        while len(queue.status().units) > 1:
            time.sleep(0.01)
        table.drop(table.put(prompts(*[1] * 3000)), "gone")
        other = Depot(queue.url, f"ipc://{tmp_path}/other", 30)
        rows = np.concatenate([table.put(prompts(*[2] * 1500)) for _ in range(4)])
        assert len(queue.status().units) == 2
        assert min(queue.status().units.values()) > 0
        assert table.read(rows, ["prompt"])["prompt"].lengths.tolist() == [2] * 6000
        table.drop(rows, "gone")
        assert table.status().bytes == 0
        other.close()


# Copies


def test_rows_on_two_units_outlive_one_unit_after_another(tmp_path):
    with placed(tmp_path, 2) as (queue, depots, controller):
        table = queue.create_table("t", Schema(COLUMNS), replicas=2)
        table.task("train", ("prompt", "answer"))
        before = table.status().bytes
        rows = np.concatenate([table.put(prompts(50, 60), repeat=2) for _ in range(6)])
        table.write(rows[::2], {"answer": [str(row) for row in rows[::2]]})
        for number in range(3):
            gone = depots.pop(0)
            gone.close()
            while gone.url in queue.status().units:
                time.sleep(0.01)
            assert table.read(rows, ["prompt"])["prompt"].lengths.tolist() == [50, 50, 60, 60] * 6
            assert table.read(rows[::2], ["answer"])["answer"].strings() == [str(row) for row in rows[::2]]
            depots.append(Depot(queue.url, f"ipc://{tmp_path}/again{number}", 30))
            table.write(rows[number : number + 1], {"answer": [str(rows[number])]})
            copied(controller, table)
        table.write(rows, {"answer": [str(row) for row in rows]})
        table.seal()
        seen = drained_rows(table.stream("train", rows=5))
        assert sorted(seen) == rows.tolist()
        assert settled(table).dropped == {}
        assert table.status().bytes == before == 0
        for depot in depots:
            depot.close()


def copied(controller, table):
    """Wait until every row that lives is on two units."""
    store = controller._desks[table.name].store
    rows = store.ledger.find()
    while np.any(store.placement.copied(rows) != store.ledger.written(rows)):
        time.sleep(0.005)


def drained_rows(stream):
    seen = []
    while (lease := stream.next(timeout=20)) is not None:
        assert lease.batch["answer"].strings() == [str(row) for row in lease.rows]
        lease.done()
        seen += lease.rows.tolist()
    return seen


@pytest.mark.parametrize("replicas", [0, 3])
def test_copies_are_one_or_two(tmp_path, replicas):
    with placed(tmp_path) as (queue, *_), pytest.raises(SchemaError, match="replicas are 1, or 2"):
        queue.create_table("t", Schema(COLUMNS), replicas=replicas)
    with TransferQueue.open() as queue, pytest.raises(SchemaError, match="replicas"):
        queue.create_table("t", Schema(COLUMNS), replicas=2)


def test_a_restored_table_gets_its_copies_again(tmp_path):
    (tmp_path / "a").mkdir(), (tmp_path / "b").mkdir()
    with placed(tmp_path / "a") as (queue, *_):
        table = queue.create_table("t", Schema(COLUMNS), replicas=2)
        rows = np.concatenate([table.put(prompts(500, 600)) for _ in range(4)])
        queue.snapshot(tmp_path / "saved")
    with placed(tmp_path / "b", snapshot=tmp_path / "saved") as (queue, depots, controller):
        table = queue.create_table("t", Schema(COLUMNS), replicas=2)
        copied(controller, table)
        depots[1].close()
        while len(queue.status().units) > 1:
            time.sleep(0.01)
        assert table.read(rows, ["prompt"])["prompt"].lengths.tolist() == [500, 600] * 4


# What comes in another order than one would like


def holder(depots, controller, table, row):
    """Return the unit that has a row."""
    number = int(controller._desks[table.name].store.placement.at(np.array([row]))[0])
    return next(depot for depot in depots if depot.url == controller.units.urls[number])


def without(controller, depot):
    """Let a unit end, and wait until its controller has heard of it."""
    depot.close()
    while depot.url in controller.units.urls.values():
        time.sleep(0.005)


def test_a_write_under_a_lease_finds_rows_that_have_moved(tmp_path):
    with placed(tmp_path, 4) as (queue, depots, controller):
        table = queue.create_table("t", Schema(COLUMNS), replicas=2)
        table.task("use", ("prompt",))
        for _ in range(3):
            table.put(prompts(50))
            lease = table.stream("use", rows=1).next()
            copied(controller, table)
            gone = holder(depots, controller, table, lease.rows[0])
            without(controller, gone)
            table.write(lease.rows, {"answer": ["a"]}, lease)
            lease.done()
            depots.remove(gone)
            depots.append(Depot(queue.url, f"{gone.url}.again", 30))
        assert table.ledger().done == 3
        for depot in depots:
            depot.close()


def test_a_row_outlives_a_write_that_has_no_copy_yet(tmp_path):
    with placed(tmp_path, 2) as (queue, depots, controller), ThreadPoolExecutor(1) as pool:
        table = queue.create_table("t", Schema(COLUMNS), replicas=2)
        rows, goes_on = table.put(prompts(50, 60)), threading.Event()
        gone = holder(depots, controller, table, rows[0])
        gone._copier.submit(goes_on.wait)
        write = pool.submit(table.write, rows, {"answer": ["a", "b"]})
        while not table.find().has(["answer"]).all():
            time.sleep(0.005)
        gone._upstream.close()
        goes_on.set()
        without(controller, gone)
        write.result(30)
        assert table.read(rows, ["answer"])["answer"].strings() == ["a", "b"]
        assert table.ledger().dropped == {}


def test_a_copy_that_was_refused_is_made_when_a_unit_joins(tmp_path):
    with placed(tmp_path, 2) as (queue, depots, controller):
        table, store = queue.create_table("t", Schema(COLUMNS), replicas=2), controller._desks["t"].store
        queue._link._roster.best = 1
        depots[1]._failure = StorageError("no room")
        rows = table.put(prompts(50, 60))
        depots[1]._failure = None
        mortals.until(lambda: np.all(store.placement.mirrors(rows) == 0))
        other = Depot(queue.url, f"ipc://{tmp_path}/other", 30)
        copied(controller, table)
        without(controller, depots[0])
        assert table.read(rows, ["prompt"])["prompt"].lengths.tolist() == [50, 60]
        other.close()


async def put_in_a_loop(queue, cells):
    return await (await aio.AsyncQueue(queue).table("t")).put(cells)


@pytest.mark.parametrize("kind", ["blocking", "asyncio"])
@pytest.mark.parametrize("again", ["holder", "other"])
def test_a_put_that_comes_again_is_answered_when_it_has_its_copy(tmp_path, kind, again):
    goes_on, cells = threading.Event(), prompts(50, 60)
    with placed(tmp_path, 2) as (queue, depots, controller), ThreadPoolExecutor(1) as pool, ExitStack() as stack:
        stack.callback(goes_on.set)
        table, roster = queue.create_table("t", Schema(COLUMNS), replicas=2), queue._link._roster
        for depot in depots:
            depot._copier.submit(goes_on.wait)
        blocking = kind == "blocking"
        put = pool.submit(table.put, cells) if blocking else pool.submit(asyncio.run, put_in_a_loop(queue, cells))
        mortals.until(lambda: len(table.find()))
        rows = table.find().rows
        gone = holder(depots, controller, table, rows[0])
        number = next(number for number, url in controller.units.urls.items() if url == gone.url)
        roster.best = number if again == "holder" else 3 - number
        roster.link(number).close()
        assert not wait([put], 0.5).done
        if again == "other":
            gone._upstream.close()
            goes_on.set()
            without(controller, gone)
        goes_on.set()
        assert table.read(put.result(30), ["prompt"])["prompt"].lengths.tolist() == [50, 60]
        assert (len(table.find()), len(queue.status().units)) == (2, 2 if again == "holder" else 1)


def test_half_a_copy_is_none(tmp_path):
    with placed(tmp_path, 2, lambda table, columns: ["use"]) as (queue, depots, controller):
        table = queue.create_table("t", Schema(COLUMNS), replicas=2)
        table.task("use", ("prompt",))
        rows = table.put(prompts(50), repeat=2)
        store = controller._desks["t"].store
        store.placement._copied.put(rows, store.schema.mask(["prompt", "source", "prompt_id", "group_id"]))
        without(controller, holder(depots, controller, table, rows[0]))
        assert table.read(rows, ["rollout_id"])["rollout_id"].array.tolist() == [0, 1]
        assert not table.find().has(["prompt"]).any()


def test_what_a_table_frees_is_not_counted_for_the_next_of_its_name(tmp_path):
    with placed(tmp_path, 2) as (queue, depots, _):
        table = queue.create_table("t", Schema(COLUMNS))
        rows = np.concatenate([table.put(prompts(500)) for _ in range(4)])
        with depots[0]._lock, depots[1]._lock:
            table.drop(rows, "over")
            table.drop_table()
            table = queue.create_table("t", Schema(COLUMNS))
        assert table.status().bytes == 0
        assert set(queue.status().units.values()) == {0}
