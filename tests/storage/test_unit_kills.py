"""Storage units killed in the middle of what others do with them: with two copies, nobody notices."""

import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from queue import SimpleQueue
from threading import Event
from typing import Any

import numpy as np
import pytest

from asyncflow.errors import StorageError
from asyncflow.storage import Schema, TransferQueue
from asyncflow.storage.client import Table
from asyncflow.storage.controller import Controller
from asyncflow.storage.depot import Depot
from asyncflow.storage.link import EmbeddedLink
from asyncflow.storage.units import Units
from tests.storage import mortals
from tests.storage.mortals import LARGE, PATIENCE, WIDTH, Nursery

ROUNDS = 3
ROWS = 160
FEW = 24


@pytest.fixture(scope="module")
def nursery(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nursery]:
    yield from mortals.nursery(tmp_path_factory.mktemp("nursery"))


class Cluster:
    """A queue of two units that live and one that is killed and follows itself."""

    def __init__(self, folder: Path, nursery: Nursery, replicas: int) -> None:
        self._folder, self._nursery, self._stack = folder, nursery, ExitStack()
        self.host = self._stack.enter_context(TransferQueue(EmbeddedLink(Controller(units=Units()))))
        self.url = self.host.serve(f"ipc://{folder}/queue")
        for number in range(2):
            self._stack.callback(Depot(self.url, f"ipc://{folder}/lasting{number}", PATIENCE).close)
        self.queue = self._stack.enter_context(TransferQueue.open(self.url, PATIENCE))
        self.table = self.queue.create_table("t", Schema(mortals.COLUMNS), replicas=replicas)
        self.table.task("use", reads=("x", "cells"), max_attempts=1000)

    def kill_units(self, told: "SimpleQueue[Any]", seed: int, rows: int = 0, most: int = 6) -> None:
        """Start a unit, put some rows, of which it gets most, and kill it some time after; several times."""
        random = np.random.default_rng(seed)
        for turn in range(ROUNDS):
            mortal = self._nursery.start(mortals.unit, controller=self.url, url=f"ipc://{self._folder}/mortal{turn}")
            mortal.hear()
            for number in range(rows * turn, rows * (turn + 1), WIDTH):
                self.table.put(mortals.columns(number))
            for _ in range(1 + random.integers(0, most)):
                told.get(timeout=PATIENCE)
            time.sleep(random.uniform(0, 0.004))
            mortal.kill()
            mortal.rest()
            mortals.until(lambda: len(self.queue.status().units) == 2)
        told.get(timeout=PATIENCE)

    def close(self) -> None:
        self._stack.close()


@pytest.fixture
def cluster(tmp_path: Path, nursery: Nursery) -> Iterator[Cluster]:
    made = Cluster(tmp_path, nursery, replicas=2)
    yield made
    made.close()


def cells(table: Table, rows: Any) -> list[int]:
    """Return the numbers of rows, whose cells are their own."""
    batch = table.read(rows, ["x", "cells"])
    assert np.array_equal(batch["cells"].values.reshape(-1, LARGE), np.repeat(batch["x"].array[:, None], LARGE, 1))
    numbers: list[int] = batch["x"].array.tolist()
    return numbers


def test_no_put_is_lost_or_made_twice(cluster: Cluster, pool: ThreadPoolExecutor) -> None:
    told, over = SimpleQueue[int](), Event()

    def produce() -> int:
        with TransferQueue.open(cluster.url, PATIENCE) as queue:
            table, number = queue.table("t"), 0
            while not over.is_set():
                rows = table.put(mortals.columns(number * WIDTH), timeout=PATIENCE)
                assert cells(table, rows) == list(range(number * WIDTH, (number + 1) * WIDTH))
                number += 1
                told.put(number)
            return number

    work: Future[int] = pool.submit(produce)
    try:
        cluster.kill_units(told, 0)
    finally:
        over.set()
    puts = work.result(PATIENCE)
    assert sorted(cells(cluster.table, cluster.table.find().rows)) == list(range(puts * WIDTH))


def test_each_row_is_used_and_written_once(cluster: Cluster, pool: ThreadPoolExecutor) -> None:
    table, told = cluster.table, SimpleQueue[int]()
    table.task("look", reads=("x", "twice"))

    def consume() -> list[int]:
        found: list[int] = []
        with TransferQueue.open(cluster.url, PATIENCE) as queue:
            table = queue.table("t")
            for lease in table.stream("use", rows=1):
                assert lease.batch["cells"].values.tolist() == lease.batch["x"].array.tolist() * LARGE
                table.write(lease.rows, {"twice": 2 * lease.batch["x"].array}, lease)
                lease.done()
                found += lease.batch["x"].array.tolist()
                told.put(1)
        return found

    work = pool.submit(consume)
    cluster.kill_units(told, 1, ROWS)
    table.seal()
    assert sorted(work.result(PATIENCE)) == list(range(ROWS * ROUNDS))
    with table.stream("look") as stream:
        lease = stream.next(PATIENCE)
        assert lease is not None
        assert np.array_equal(lease.batch["twice"].array, 2 * lease.batch["x"].array)
        lease.done()
    assert table.ledger().done == ROWS * ROUNDS


def test_a_snapshot_is_whole_or_an_error(cluster: Cluster, pool: ThreadPoolExecutor, tmp_path: Path) -> None:
    table, told, over = cluster.table, SimpleQueue[str](), Event()

    def save() -> None:
        while not over.is_set():
            try:
                cluster.queue.snapshot(tmp_path / "saved", PATIENCE)
                told.put("saved")
            except StorageError as error:
                told.put(str(error))

    work = pool.submit(save)
    try:
        cluster.kill_units(told, 2, FEW, most=1)
    finally:
        over.set()
    work.result(PATIENCE)
    cluster.queue.snapshot(tmp_path / "saved", PATIENCE)
    with TransferQueue.restore(tmp_path / "saved") as back:
        assert sorted(cells(back.table("t"), back.table("t").find().rows)) == list(range(FEW * ROUNDS))
    assert sorted(cells(table, table.find().rows)) == list(range(FEW * ROUNDS))
