import multiprocessing
import os
import signal
import time
from collections import Counter

import numpy as np
import pytest
from torch.utils.data import DataLoader

from asyncflow.errors import SchemaError, StorageError, WaitTimeout
from asyncflow.storage import Schema, TransferQueue
from asyncflow.storage.loader import Loader

ROWS = 24


@pytest.fixture
def url(address):
    with TransferQueue.open() as host:
        yield host.serve(address)


@pytest.fixture
def table(url):
    with TransferQueue.open(url) as queue:
        made = queue.create_table("train", Schema({"tokens": "list<int64>", "number": "int64"}))
        made.task("learn", reads=("tokens", "number"), max_attempts=3)
        yield made


def fill(table, count=ROWS):
    table.put({"number": np.arange(count), "tokens": [np.arange(n) for n in range(count)]})
    table.seal()


def workers(loader, count, **options):
    return DataLoader(loader.dataset(), batch_size=None, num_workers=count, **options)


def numbers(batch):
    return batch["number"].array.tolist()


def killing(url, told):
    loader = Loader(url, "train", "learn", rows=2, make=padded)
    for batch in loader.batches(workers(loader, 2)):
        told.send(batch["number"].tolist())
        os.kill(batch["pid"], signal.SIGKILL)


def padded(batch):
    return {"tokens": batch["tokens"].to_padded()[0], "number": batch["number"].to_torch(), "pid": os.getpid()}


def poisoned(batch):
    if 5 in batch["number"].array:
        raise ValueError("a row that cannot be used")
    return numbers(batch)


def test_a_plain_loop_gets_each_row_once(url, table):
    fill(table)
    seen = [number for batch in Loader(url, "train", "learn", rows=5) for number in numbers(batch)]
    assert seen == list(range(ROWS))
    assert table.ledger().done == ROWS


def test_a_batch_is_acknowledged_when_the_next_is_asked_for(url, table):
    fill(table)
    loop = iter(Loader(url, "train", "learn", rows=4))
    next(loop)
    assert table.status().tasks["learn"].done == 0
    next(loop)
    assert table.status().tasks["learn"].done == 4
    loop.close()
    assert numbers(next(iter(Loader(url, "train", "learn", rows=4)))) == [4, 5, 6, 7]


@pytest.mark.parametrize(("count", "options"), [(0, {}), (2, {}), (2, {"in_order": False, "prefetch_factor": 1})])
def test_workers_bring_each_row_once_and_all_of_them_end(url, table, count, options):
    fill(table)
    loader = Loader(url, "train", "learn", rows=2, make=padded)
    seen, pids = Counter(), set()
    for batch in loader.batches(workers(loader, count, **options)):
        assert batch["tokens"].shape == (2, batch["number"].max())
        seen.update(batch["number"].tolist())
        pids.add(batch["pid"])
    assert seen == Counter(range(ROWS))
    assert (os.getpid() in pids) == (count == 0)
    assert table.ledger().done == ROWS


def test_rows_that_come_late_reach_waiting_workers(url, table, pool):
    loader = Loader(url, "train", "learn", rows=4)
    found = pool.submit(lambda: [n for batch in loader.batches(workers(loader, 2)) for n in numbers(batch)])
    fill(table)
    assert sorted(found.result(60)) == list(range(ROWS))


def slow(batch):
    if 0 in batch["number"].array:
        time.sleep(1)
    return numbers(batch)


def test_a_worker_stays_until_what_it_brought_is_acknowledged(url, table):
    fill(table)
    loader = Loader(url, "train", "learn", rows=2, make=slow)
    # The other worker brings all that is left meanwhile, and then has nothing to do.
    batches = loader.batches(workers(loader, 2, prefetch_factor=ROWS))
    assert sorted(number for batch in batches for number in batch) == list(range(ROWS))
    assert table.ledger().done == ROWS


@pytest.mark.parametrize("count", [0, 2])
def test_what_a_loop_that_is_left_had_not_consumed_comes_again(url, table, count):
    fill(table)
    loader = Loader(url, "train", "learn", rows=2)
    loop = loader.batches(workers(loader, count))
    first = numbers(next(loop))
    left = numbers(next(loop))
    loop.close()
    again = [number for batch in loader for number in numbers(batch)]
    assert sorted(first + again) == list(range(ROWS))
    assert set(left) <= set(again)


def test_a_killed_worker_loses_nothing(url, table):
    fill(table)
    listening, told = multiprocessing.Pipe(duplex=False)
    # torch raises for a dead worker out of a signal handler, wherever the trainer just is: it has a process of its own.
    trainer = multiprocessing.get_context("fork").Process(target=killing, args=(url, told))
    trainer.start()
    told.close()
    trainer.join()
    seen = []
    while listening.poll():
        try:
            seen += listening.recv()
        except EOFError:
            break
    again = [number for batch in Loader(url, "train", "learn", rows=2, make=numbers) for number in batch]
    assert trainer.exitcode == 1
    assert seen
    assert set(seen + again) == set(range(ROWS))
    assert table.ledger().done == ROWS


def test_a_durable_task_is_acknowledged_with_its_step(url, table):
    table.task("save", reads=("number",), durable=True)
    fill(table)
    loader = Loader(url, "train", "save", rows=8)
    for step, (batch, lease) in enumerate(loader.leases(workers(loader, 2, in_order=False))):
        assert (len(batch), len(lease), lease.attempt) == (8, 8, 1)
        lease.extend(60)
        lease.done(step)
    table.commit("save", 2)
    assert table.status().tasks["save"].done == ROWS


def test_a_durable_task_wants_a_step(url, table):
    table.task("save", reads=("number",), durable=True)
    fill(table)
    with pytest.raises(SchemaError, match="durable"):
        list(Loader(url, "train", "save"))


def test_rows_that_cannot_be_made_into_a_batch_are_dropped_in_the_end(url, table):
    fill(table)
    loader = Loader(url, "train", "learn", rows=1, make=poisoned)
    for _attempt in range(3):
        with pytest.raises(ValueError, match="cannot be used"):
            list(loader)
    assert [number for batch in loader for number in batch] == list(range(6, ROWS))
    assert table.ledger().dropped == {"max_attempts:learn": 1}


def test_a_wait_without_end_is_ended(url, table):
    with pytest.raises(WaitTimeout, match="learn"):
        next(iter(Loader(url, "train", "learn", rows=1, timeout=0.2)))


def test_loaders_that_cannot_be_are_refused(url, table):
    fill(table)
    with pytest.raises(StorageError, match="serve the queue"):
        Loader("embedded://", "train", "learn")
    loader = Loader(url, "train", "learn", rows=1, make=numbers)
    with pytest.raises(StorageError, match="batch_size=None"):
        next(loader.batches(DataLoader(loader.dataset())))
