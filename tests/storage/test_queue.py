"""What the store promises, over every transport."""

import threading

import numpy as np
import pytest

from asyncflow.errors import (
    CapacityExceeded,
    CellConflict,
    ColumnMissing,
    LeaseLost,
    QueueClosed,
    QueueFailed,
    RowGone,
    SchemaError,
    StorageError,
    WaitTimeout,
)
from asyncflow.storage import Batch, Schema, TransferQueue
from asyncflow.storage.batch import Column
from asyncflow.storage.schema import IDENTITY, ITEMS


def tokens(*lengths):
    return [np.arange(length) + 10 * length for length in lengths]


def put(table, count, **columns):
    return table.put({"tokens": tokens(*range(1, count + 1)), **columns})


# Values


def test_every_dtype_comes_back_bit_for_bit(queue):
    raw = np.random.default_rng(3).integers(0, 256, 16 * 24, np.uint8)
    columns = {}
    for name, item in ITEMS.items():
        flat = (raw & 1 if name == "bool" else raw).view(item)[:24]
        columns[f"fixed {name}"] = Column.of(name, flat)
        columns[f"list {name}"] = Column.ragged(flat[:20], np.array([0, *[5] * 4, *[9] * 19, 20]), f"list<{name}>")
    batch = Batch(columns)
    table = queue.create_table("all", batch.schema)
    rows = table.put(batch)
    assert table.read(rows, batch.names).equals(batch)
    order = [3, 0, 0, 23, 4]
    assert table.read(rows[order], batch.names).equals(batch.take(order))


def test_texts_bytes_and_extremes_come_back(queue):
    batch = Batch(
        {
            "text": ["", "ascii", "日本語 🙂 \x00", "ж" * 100_000],
            "blob": [b"", bytes(range(256)), b"\x00", b"x" * 70_000],
            "nan": np.array([np.nan, np.inf, -0.0, 5e-324]),
            "empty": [np.empty(0, np.float32)] * 4,
            "long": [np.arange(n, dtype=np.int32) for n in (0, 50_000, 1, 0)],
            "dense": np.arange(24, dtype=np.int8).reshape(4, 2, 3),
            "flat": np.zeros((4, 0, 2), np.uint16),
            "vectors": [np.full((n, 3), -0.0, np.float16) for n in (0, 9_000, 1, 0)],
            "strided": np.arange(16.0).reshape(4, 4).T[::-1, ::2],
        }
    )
    table = queue.create_table("texts", batch.schema)
    assert table.read(table.put(batch), batch.names).equals(batch)


def test_a_column_that_does_not_fit_is_refused_whole(table):
    for columns in ({"score": np.zeros(2)}, {"other": np.zeros(2)}, {"tokens": [np.zeros(1, np.int32)] * 2}):
        with pytest.raises(SchemaError):
            table.put(Batch({"text": ["a", "b"], **columns}))
        with pytest.raises(SchemaError):
            table.put({"text": ["a", "b"], **columns})
    assert (table.ledger().admitted, table.status().bytes) == (0, 0)


def test_what_the_caller_does_with_its_memory_later_changes_nothing(table):
    memory = np.array([1.0, 2.0], np.float32)
    rows = table.put({"score": memory})
    memory[:] = 9
    assert table.read(rows, ["score"])["score"].array.tolist() == [1.0, 2.0]


# Rows and identity


def test_rows_are_numbered_once_for_all(table):
    table.task("all", reads=())
    first = put(table, 3)
    for lease in [table.stream("all").next()]:
        lease.done()
    again = put(table, 2)
    assert [*first, *again] == [0, 1, 2, 3, 4]
    with pytest.raises(RowGone, match="rows 0, 1, 2"):
        table.read(first, ["tokens"])
    with pytest.raises(RowGone):
        table.write(first, {"text": ["x"] * 3})
    table.drop(first, "late")
    assert table.ledger().dropped == {}


def test_identity_is_filled_in(table):
    rows = put(table, 2)
    batch = table.read(rows, list(IDENTITY))
    assert batch["source"].strings() == ["", ""]
    assert [batch[name].array.tolist() for name in list(IDENTITY)[1:]] == [[-1, -1], [0, 1], [0, 0], [0, 0]]


def test_given_identity_is_kept_and_group_ids_are_not_given_twice(table):
    put(table, 2, group_id=[7, 7], rollout_id=[0, 1], source=["a", "b"], prompt_id=[3, 3], segment=[0, 1])
    rows = table.put({"tokens": tokens(1, 2)}, repeat=3)
    batch = table.read(rows, ["group_id", "rollout_id"])
    assert batch["group_id"].array.tolist() == [8, 8, 8, 9, 9, 9]
    assert batch["rollout_id"].array.tolist() == [0, 1, 2, 0, 1, 2]
    named = table.put({"group_id": [20, 12]}, repeat=2)
    assert table.read(named, ["group_id"])["group_id"].array.tolist() == [20, 20, 12, 12]
    with pytest.raises(SchemaError, match="a group_id stands twice"):
        table.put({"group_id": [1, 1]}, repeat=2)
    with pytest.raises(SchemaError, match="assigns rollout_id"):
        table.put({"rollout_id": [1]}, repeat=2)


def test_shared_values_are_held_once(table):
    prompt = np.arange(10_000)
    rows = table.put({"tokens": [prompt]}, repeat=64)
    assert table.status().bytes < 2 * prompt.nbytes
    assert all(np.array_equal(cell, prompt) for cell in table.read(rows[::-1], ["tokens"])["tokens"])


def test_tables_do_not_see_each_other(queue, table):
    other = queue.create_table("other", table.schema)
    put(table, 3)
    assert (put(other, 1).tolist(), other.status().rows, table.status().rows) == ([0], 1, 3)


def test_a_table_is_created_once(queue, table):
    assert queue.create_table("train", table.schema).schema == queue.table("train").schema == table.schema
    with pytest.raises(SchemaError, match="exists"):
        queue.create_table("train", Schema({"a": "int8"}))
    with pytest.raises(SchemaError, match="exists"):
        queue.create_table("train", table.schema, max_rows=3)
    with pytest.raises(SchemaError, match="no table 'nope'; tables: train"):
        queue.table("nope")


# Cells


def test_a_row_is_ready_when_all_columns_are_written(table):
    table.task("judge", reads=("tokens", "text"))
    rows = put(table, 3)
    stream = table.stream("judge", rows=2)
    assert table.status().tasks["judge"].blocked == 3
    table.write(rows[[2, 0]], {"text": ["c", "a"]})
    lease = stream.next()
    assert (lease.rows.tolist(), lease.batch["text"].strings()) == ([0, 2], ["a", "c"])
    assert lease.batch.names == ("tokens", "text", *IDENTITY)


def test_the_same_value_again_is_harmless_and_another_is_refused_whole(table):
    rows = put(table, 3)
    table.write(rows[:2], {"text": ["a", "b"]})
    table.write(rows, {"text": ["a", "b", "c"]})
    before = table.status().bytes
    with pytest.raises(CellConflict, match="row 1 has another value of 'text'"):
        table.write(rows, {"score": [1.0, 2.0, 3.0], "text": ["a", "X", "c"]})
    assert table.status().bytes == before
    with pytest.raises(ColumnMissing, match="score not written for rows 0, 1, 2"):
        table.read(rows, ["text", "score"])


def test_a_write_that_does_not_fit_is_refused(table):
    rows = put(table, 2)
    for bad, columns in (
        (rows, {"text": ["a"]}),
        (rows[[0, 0]], {"text": ["a", "b"]}),
        (rows, {"what": ["a", "b"]}),
    ):
        with pytest.raises(SchemaError):
            table.write(bad, columns)
    for unknown in ([0, 9], [-1, 0]):
        with pytest.raises(RowGone):
            table.write(unknown, {"text": ["a", "b"]})


def test_reading_does_not_consume(table):
    table.task("all", reads=("tokens",))
    rows = put(table, 2)
    for _ in range(3):
        table.read(rows, ["tokens"])
        table.status()
    assert table.status().tasks["all"].waiting == 2
    assert len(table.read([], ["tokens", "text"])) == 0


# Consumption


def test_tasks_consume_independently_and_each_row_once(table):
    table.task("a", reads=("tokens",))
    put(table, 6)
    table.task("b", reads=("tokens",))
    streams = {name: [table.stream(name, rows=2) for _ in range(2)] for name in "ab"}
    for name in "ab":
        leases = [stream.next() for stream in streams[name] for _ in range(1)] + [streams[name][0].next()]
        assert [row for lease in leases for row in lease.rows] == list(range(6))
        for lease in leases:
            lease.done()
    assert (table.ledger().done, table.status().bytes) == (6, 0)


def test_groups_come_whole_whatever_the_order_of_arrival(table):
    table.task("train", reads=("score",), sampler="group")
    rows = put(table, 6, group_id=[5, 9, 5, 9, 5, 2])
    table.write(rows[[0, 2, 3, 5]], {"score": [0.0, 1.0, 2.0, 3.0]})
    stream = table.stream("train", groups=1)
    assert stream.next().rows.tolist() == [5]
    with pytest.raises(WaitTimeout, match="waited for 1 groups"):
        stream.next(timeout=0.05)
    table.drop(rows[[4]], "aborted")
    assert stream.next().rows.tolist() == [0, 2]
    table.write(rows[[1]], {"score": [9.0]})
    assert stream.next().batch["group_id"].array.tolist() == [9, 9]


def test_a_waiting_stream_is_served_when_its_rows_become_ready(table, pool):
    table.task("judge", reads=("text",))
    streams = [table.stream("judge", rows=1) for _ in range(2)]
    waits = [pool.submit(stream.next) for stream in streams]
    rows = put(table, 2)
    table.write(rows, {"text": ["a", "b"]})
    assert sorted(int(wait.result().rows[0]) for wait in waits) == [0, 1]


def test_partial_and_unbounded_streams_take_what_there_is(table):
    table.task("all", reads=("tokens",))
    put(table, 3)
    assert len(table.stream("all", rows=2, partial=True).next().rows) == 2
    assert len(table.stream("all", rows=2, partial=True).next().rows) == 1
    put(table, 3)
    assert len(table.stream("all").next().rows) == 3


def test_a_phase_is_held_back_until_it_is_complete(table, pool):
    table.task("judge", reads=("text",))
    rows = put(table, 3)
    wait = pool.submit(table.stream("judge", whole=True).next)
    for row in rows:
        table.write([row], {"text": ["x"]})
    assert wait.result().rows.tolist() == [0, 1, 2]


def test_batches_may_be_fetched_ahead(table):
    table.task("all", reads=("tokens",))
    put(table, 6)
    stream = table.stream("all", rows=2, credit=2)
    first = stream.next()
    assert table.status().tasks["all"].leased == 4
    assert [first.rows.tolist(), stream.next().rows.tolist()] == [[0, 1], [2, 3]]
    stream.close()
    assert table.status().tasks["all"].waiting == 6


def test_the_end_comes_to_every_stream_when_nothing_more_can_come(table, pool):
    table.task("judge", reads=("text",))
    rows = put(table, 5)
    table.seal()
    streams = [table.stream("judge", rows=2) for _ in range(3)]
    waits = [pool.submit(lambda each=stream: [len(lease.rows) for lease in iter_done(each)]) for stream in streams]
    table.write(rows, {"text": list("abcde")})
    assert sorted(size for wait in waits for size in wait.result()) == [1, 2, 2]
    assert streams[0].next() is None
    with pytest.raises(QueueClosed, match="sealed"):
        put(table, 1)


def iter_done(stream):
    for lease in stream:
        lease.done()
        yield lease


def test_the_end_waits_for_leases_of_others(table, pool):
    table.task("all", reads=("tokens",))
    put(table, 1)
    table.seal()
    holder = table.stream("all", rows=1)
    lease = holder.next()
    wait = pool.submit(table.stream("all", rows=1).next)
    lease.release()
    assert wait.result().rows.tolist() == [0]


# Leases


def test_an_expired_lease_is_delivered_again_and_fenced(table):
    table.task("judge", reads=("tokens",), lease_seconds=0.05)
    put(table, 2)
    stream = table.stream("judge", rows=2)
    late, again = stream.next(), stream.next()
    assert (late.attempt, again.attempt, again.rows.tolist()) == (1, 2, [0, 1])
    with pytest.raises(LeaseLost):
        late.done()
    with pytest.raises(LeaseLost):
        late.extend(5)
    with pytest.raises(LeaseLost):
        table.write(late.rows, {"text": ["a", "b"]}, lease=late)


def test_rows_that_always_fail_are_dropped_with_a_reason(table):
    table.task("judge", reads=("tokens",), max_attempts=2)
    put(table, 3)
    stream = table.stream("judge", rows=3)
    for attempt in (1, 2):
        lease = stream.next()
        assert lease.attempt == attempt
        lease.release(failed=True)
    assert table.ledger().dropped == {"max_attempts:judge": 3}
    assert table.status().bytes == 0


def test_what_is_given_back_does_not_count(table):
    table.task("judge", reads=("tokens",), max_attempts=1)
    put(table, 2)
    for _ in range(3):
        with table.stream("judge", rows=2) as stream:
            lease = stream.next()
            assert lease.attempt == 1
        with pytest.raises(LeaseLost):
            lease.done()
        with pytest.raises(QueueClosed):
            stream.next()
        table.stream("judge", rows=2).next().release()


def test_a_write_under_a_lease_is_for_its_rows_only(table):
    table.task("judge", reads=("tokens",))
    put(table, 4)
    stream = table.stream("judge", rows=2)
    lease = stream.next()
    table.write(lease.rows, {"text": ["a", "b"]}, lease=lease)
    with pytest.raises(LeaseLost, match="does not hold row 3"):
        table.write([1, 3], {"score": [0.0, 0.0]}, lease=lease.id)
    lease.drop(lease.rows[:1], "filtered")
    lease.done()
    assert table.ledger().dropped == {"filtered": 1}
    assert table.ledger().done == 1


def test_a_durable_task_commits_and_rewinds(table):
    table.task("train", reads=("tokens",), durable=True)
    put(table, 4)
    stream = table.stream("train", rows=2)
    for step in (1, 2):
        stream.next().done(step=step)
    assert table.ledger().live == 4
    table.commit("train", 1)
    assert table.ledger().done == 2
    table.rewind("train", 1)
    lease = stream.next()
    assert (lease.rows.tolist(), lease.attempt) == ([2, 3], 1)
    lease.done(step=2)
    table.commit("train", 2)
    assert (table.ledger().done, table.status().bytes) == (4, 0)
    with pytest.raises(RowGone, match="committed step 2"):
        table.rewind("train", 1)


def test_what_was_not_declared_is_refused(table):
    table.task("judge", reads=("tokens",))
    with pytest.raises(SchemaError, match="no task 'nope'; declared: judge"):
        table.stream("nope", rows=1)
    with pytest.raises(SchemaError, match="no column 'nope'"):
        table.task("other", reads=("nope",))
    for wish in ({"groups": 1}, {"rows": 0}, {"rows": -1}):
        with pytest.raises(SchemaError):
            table.stream("judge", **wish)


# Limits


def test_a_full_table_holds_back_its_producers_in_their_order(queue, pool):
    table = queue.create_table("small", Schema({"x": "int64"}), max_rows=4)
    table.task("all", reads=("x",))
    table.put({"x": np.arange(3)})
    with pytest.raises(WaitTimeout, match=r"put of 3 rows .* waited for room; it holds 3 rows"):
        table.put({"x": np.arange(3)}, timeout=0.05)
    assert table.ledger().admitted == 3
    wait = pool.submit(table.put, {"x": np.arange(4)})
    table.stream("all", rows=3).next().done()
    assert wait.result().tolist() == [3, 4, 5, 6]


def test_bytes_count(queue):
    table = queue.create_table("small", Schema({"x": "int64"}), max_bytes=500)
    table.put({"x": np.arange(10)})
    with pytest.raises(WaitTimeout):
        table.put({"x": np.arange(10)}, timeout=0.05)
    with pytest.raises(CapacityExceeded, match="one put has 100 rows"):
        table.put({"x": np.arange(100)})
    with pytest.raises(CapacityExceeded):
        table.put({"x": [1]}, repeat=2**40)


def test_memory_returns_to_the_base_line(table):
    table.task("score", reads=("tokens",))
    table.task("train", reads=("tokens", "score"), sampler="group", durable=True)
    score, train = table.stream("score", rows=16), table.stream("train", groups=4)
    for step in range(5):
        table.put({"tokens": tokens(5, 6, 7, 8)}, repeat=4)
        lease = score.next()
        table.write(lease.rows, {"score": np.ones(16, np.float32)}, lease)
        lease.done()
        train.next().done(step)
        table.commit("train", step)
        assert table.status().bytes == 0
    counts = table.ledger()
    assert (counts.admitted, counts.done, counts.live) == (80, 80, 0)


# Errors, ends and closing


def test_a_wait_that_ends_says_who_waited_for_what(table):
    table.task("judge", reads=("tokens", "text", "score"))
    rows = put(table, 3)
    table.write(rows[:1], {"text": ["a"], "score": [0.0]})
    with pytest.raises(WaitTimeout) as caught:
        table.stream("judge", rows=2, consumer="judge-0").next(timeout=0.05)
    for part in ("'train'", "'judge'", "judge-0", "2 rows", "1 ready", "rows 1, 2", "text, score"):
        assert part in str(caught.value)


def test_a_timed_out_wait_takes_nothing_with_it(table):
    table.task("all", reads=("tokens",))
    stream = table.stream("all", rows=2)
    with pytest.raises(WaitTimeout):
        stream.next(timeout=0.01)
    put(table, 2)
    assert table.status().tasks["all"].waiting == 2
    assert stream.next().rows.tolist() == [0, 1]


def test_a_failure_reaches_every_wait_at_once(queue, table, pool):
    small = queue.create_table("small", Schema({"x": "int64"}), max_rows=1)
    small.put({"x": [1]})
    table.task("judge", reads=("text",))
    streams = [table.stream("judge", rows=1, credit=credit) for credit in (1, 3)]
    waits = [pool.submit(stream.next) for stream in streams] + [pool.submit(small.put, {"x": [2]})]
    queue.fail("rollout-3: out of memory")
    queue_errors = [wait.exception() for wait in waits]
    assert all(isinstance(error, QueueFailed) and "rollout-3" in str(error) for error in queue_errors)
    with pytest.raises(QueueFailed, match="out of memory"):
        put(table, 1)
    assert queue.status().failed == "rollout-3: out of memory"


def test_closing_a_stream_wakes_its_waiter(table, pool):
    table.task("judge", reads=("text",))
    stream = table.stream("judge", rows=1)
    entered = threading.Event()
    wait = pool.submit(lambda: (entered.set(), stream.next()))
    entered.wait()
    stream.close()
    assert isinstance(wait.exception(), QueueClosed)


def test_a_closed_queue_says_so(clients):
    queue = clients()
    table = queue.create_table("train", Schema({"x": "int64"}))
    queue.close()
    queue.close()
    with pytest.raises(QueueClosed, match="closed"):
        table.put({"x": [1]})


def test_many_threads_share_a_client(table, pool):
    table.task("all", reads=("tokens",))
    seen = []

    def consume():
        for lease in table.stream("all", rows=4, partial=True):
            seen.extend(lease.rows.tolist())
            lease.done()

    consumers = [pool.submit(consume) for _ in range(4)]
    producers = [pool.submit(lambda: [put(table, 5) for _ in range(10)]) for _ in range(4)]
    rows = sorted(int(row) for producer in producers for part in producer.result() for row in part)
    table.seal()
    for consumer in consumers:
        consumer.result()
    assert sorted(seen) == rows == list(range(200))


def test_several_clients_share_a_queue(clients):
    first, second = clients(), clients()
    table = first.create_table("train", Schema({"x": "int64"}))
    table.task("all", reads=("x",))
    rows = second.table("train").put({"x": [1, 2]})
    assert table.stream("all", rows=2).next().rows.tolist() == rows.tolist()
    assert set(first.status().tables) == {"train"}


@pytest.mark.parametrize("url", ["http://x", "embedded", "ipc", ""])
def test_an_address_that_is_none_is_refused(url):
    with pytest.raises(StorageError, match="no address"):
        TransferQueue.open(url)
