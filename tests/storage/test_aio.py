"""The asyncio client keeps the promises of the blocking one, beside it and when its calls are cancelled."""

import asyncio
import threading
import time
from contextlib import ExitStack

import numpy as np
import pytest

from asyncflow.errors import QueueClosed, SchemaError, WaitTimeout
from asyncflow.storage import Schema, TransferQueue, aio, cluster, link, wire
from asyncflow.storage.controller import Controller
from asyncflow.storage.depot import Depot
from asyncflow.storage.link import EmbeddedLink, Pending
from asyncflow.storage.units import Units

SCHEMA = Schema({"x": "int64", "y": "int64"})


@pytest.fixture
def both(clients):
    """The same queue with awaited and with blocking calls."""
    host = clients()
    table = host.create_table("t", SCHEMA, max_rows=100)
    table.task("use", ["x"])
    return aio.AsyncQueue(clients()), table


def test_rows_go_through_with_awaited_calls_alone(both):
    queue, blocking = both

    async def produce(table):
        for start in range(0, 40, 4):
            await table.put({"x": np.arange(start, start + 4)})
        await table.seal()

    async def consume(table):
        seen = []
        async with table.stream("use", rows=4) as stream:
            async for lease in stream:
                await table.write(lease.rows, {"y": lease.batch["x"].array * 2}, lease)
                assert (await table.read(lease.rows[::-1], ["y"]))["y"].array.tolist() == [
                    2 * x for x in lease.batch["x"].array[::-1].tolist()
                ]
                await lease.done()
                seen += lease.batch["x"].array.tolist()
        return seen

    async def main():
        table = await queue.table("t")
        parts = await asyncio.gather(consume(table), consume(table), produce(table))
        return sorted(parts[0] + parts[1])

    assert asyncio.run(main()) == list(range(40))
    assert (blocking.ledger().admitted, blocking.ledger().done) == (40, 40)


def test_a_hundred_waits_share_one_loop_and_hold_up_nobody(both):
    queue, blocking = both

    async def main():
        table = await queue.table("t")
        streams = [table.stream("use", rows=1) for _ in range(100)]
        waits = [asyncio.ensure_future(stream.next()) for stream in streams]
        await asyncio.sleep(0)
        assert (await table.status()).rows == 0
        await table.put({"x": np.arange(100)})
        return sorted(lease.batch["x"].array[0] for lease in await asyncio.gather(*waits))

    assert asyncio.run(main()) == list(range(100))
    assert blocking.status().tasks["use"].leased == 100


def test_a_cancelled_wait_leaves_no_lease_behind(both):
    queue, blocking = both

    async def main():
        table = await queue.table("t")
        stream = table.stream("use", rows=1)
        for x in range(20):
            wait = asyncio.ensure_future(stream.next())
            await asyncio.sleep(0.002 * (x % 3))
            put = asyncio.ensure_future(table.put({"x": [x]}))
            await asyncio.sleep(0)
            wait.cancel()
            await put
            kept = (await asyncio.gather(wait, return_exceptions=True))[0]
            if isinstance(kept, aio.AsyncLease):
                await kept.release()
        got = []
        while len(got) < 20:
            lease = await stream.next(10)
            got += lease.batch["x"].array.tolist()
            assert lease.attempt == 1
            await lease.done()
        return sorted(got)

    assert asyncio.run(main()) == list(range(20))
    assert blocking.ledger().done == 20


def test_a_bounded_wait_says_what_it_waited_for(both):
    queue, _ = both

    async def waits():
        table = await queue.table("t")
        await table.stream("use", rows=3, consumer="me").next(timeout=0.05)

    with pytest.raises(WaitTimeout, match=r"table 't', task 'use' \(consumer 'me'\): waited for 3 rows"):
        asyncio.run(waits())


def test_a_full_table_holds_back_an_awaited_put_and_a_blocking_consumer_frees_it(both):
    queue, blocking = both

    async def main():
        table = await queue.table("t")
        await table.put({"x": np.arange(100)})
        late = asyncio.ensure_future(table.put({"x": [100]}))
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(asyncio.shield(late), 0.05)
        lease = await asyncio.to_thread(lambda: blocking.stream("use", rows=50).next())
        await asyncio.to_thread(lease.done)
        return len(await late)

    assert asyncio.run(main()) == 1


def test_errors_are_those_of_the_blocking_calls(both):
    queue, _ = both

    async def main():
        table = await queue.table("t")
        with pytest.raises(SchemaError, match="no column"):
            await table.put({"z": [1]})
        await queue.close()
        with pytest.raises(QueueClosed):
            await table.put({"x": [1]})

    asyncio.run(main())


def test_a_loop_that_ends_in_the_middle_of_a_wait_harms_nobody(both):
    queue, blocking = both

    async def main():
        table = await queue.table("t")
        asyncio.get_running_loop().call_later(0.05, lambda: None)
        wait = asyncio.ensure_future(table.stream("use", rows=1).next())
        await asyncio.sleep(0.05)
        return wait

    asyncio.run(main())
    blocking.put({"x": [1]})
    assert blocking.status().rows == 1


@pytest.mark.parametrize("timeout", [0.01, 60])
def test_an_answer_after_a_cancelled_wait_is_handed_on_also_when_the_loop_is_over(timeout):
    pending, handed = Pending("the queue"), threading.Event()

    async def main():
        wait = asyncio.ensure_future(aio.answered(pending, timeout, handed.set))
        await asyncio.sleep(0.05)
        wait.cancel()
        assert isinstance((await asyncio.gather(wait, return_exceptions=True))[0], asyncio.CancelledError)

    asyncio.run(main())
    assert not handed.is_set()
    pending.complete((wire.Ok(), None))
    assert handed.wait(30)


@pytest.fixture(params=[0, 1])
def served(request, address):
    """A queue of so many units, and its controller, by whose lock nothing is answered."""
    controller = Controller(units=Units() if request.param else None)
    with ExitStack() as stack:
        url = stack.enter_context(TransferQueue(EmbeddedLink(controller))).serve(address)
        for number in range(request.param):
            stack.callback(Depot(url, f"{address}.{number}", 30).close)
        yield stack.enter_context(TransferQueue.open(url)), controller


@pytest.mark.parametrize("kind", ["blocking", "asyncio"])
def test_a_batch_that_comes_when_nobody_waits_is_given_back(served, kind, monkeypatch):
    for module in (link, cluster):
        monkeypatch.setattr(module, "GRACE", 0.05)
    queue, controller = served
    table = queue.create_table("t", SCHEMA)
    table.task("use", ["x"])
    table.put({"x": [1]})

    async def main():
        stream = (await aio.AsyncQueue(queue).table("t")).stream("use", rows=1)
        await stream.__aenter__()
        with controller._lock:
            await stream.next(0.05)

    def wait(stream):
        with controller._lock:
            stream.next(0.05)

    with pytest.raises(WaitTimeout, match="did not answer"):
        asyncio.run(main()) if kind == "asyncio" else wait(table.stream("use", rows=1))
    assert table.stream("use", rows=1).next(20).attempt == 1


def test_those_who_ask_a_stream_at_once_open_it_once(both):
    queue, blocking = both

    async def main():
        table = await queue.table("t")
        stream = table.stream("use", rows=1)
        waits = [asyncio.ensure_future(stream.next()) for _ in range(4)]
        await asyncio.sleep(0)
        waits.pop().cancel()
        await table.put({"x": np.arange(3)})
        await asyncio.gather(*waits)
        assert (await queue.status()).streams == 1
        await stream.close()

    asyncio.run(main())
    assert blocking.status().tasks["use"].leased == 0


@pytest.mark.parametrize("after", [0, 0.02, 0.2])
def test_a_cancelled_connect_leaves_no_client_behind(address, after):
    async def main():
        wait = asyncio.ensure_future(aio.connect(address))
        await asyncio.sleep(after)
        wait.cancel()
        for found in await asyncio.gather(wait, return_exceptions=True):
            if isinstance(found, aio.AsyncQueue):
                await found.close()

    with TransferQueue.open() as host:
        host.serve(address)
        asyncio.run(main())
        ends = time.monotonic() + 30
        while host.status().clients and time.monotonic() < ends:
            time.sleep(0.01)
        assert host.status().clients == 0
