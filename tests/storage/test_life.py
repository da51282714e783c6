"""The life of a table: columns that are added, tasks that begin anew, the end of admission, and the end."""

import numpy as np
import pytest

from asyncflow.errors import CellConflict, ColumnMissing, LeaseLost, QueueClosed, RowGone, SchemaError
from asyncflow.storage import Schema
from tests.storage.test_queue import put

# Columns


def test_columns_are_added_to_living_rows(table):
    rows = put(table, 3)
    before = table.status().bytes
    table.add_columns({"value": "float64[2]", "text": "string"})
    table.add_columns({"value": "float64[2]"})
    assert table.status().bytes == before
    with pytest.raises(ColumnMissing, match="value not written for rows 0, 1, 2"):
        table.read(rows, ["value"])
    table.task("judge", reads=("tokens", "value"))
    table.write(rows[[2, 0]], {"value": np.array([[1.0, 2.0], [3.0, 4.0]])})
    lease = table.stream("judge", rows=2).next()
    assert lease.batch["value"].array.tolist() == [[3.0, 4.0], [1.0, 2.0]]
    assert len(table.read(put(table, 1, value=np.zeros((1, 2))), ["value"])) == 1


def test_a_column_is_added_once_and_for_all_clients(clients):
    first, second = clients(), clients()
    one = first.create_table("t", Schema({"x": "int64"}))
    other = second.table("t")
    one.add_columns({"y": "int64"})
    assert other.put({"x": [1], "y": [2]}).tolist() == [0]
    for columns in ({"y": "int32"}, {"x": "string"}, {"z": "nothing"}, {f"c{n}": "int8" for n in range(64)}):
        with pytest.raises(SchemaError):
            one.add_columns(columns)
    assert set(first.table("t").schema.columns) - set(Schema({}).columns) == {"x", "y"}


def test_columns_come_from_any_client_in_any_order(clients):
    writers = [clients() for _ in range(3)]
    table = writers[0].create_table("t", Schema({"x": "int64", "a": "int64", "b": "int64", "c": "int64"}))
    table.task("all", reads=("c", "a", "b", "x"))
    rows = table.put({"x": np.arange(6)})
    for queue, name in zip(writers, "cab", strict=True):
        for row in rows[::-1] if name == "a" else rows:
            queue.table("t").write([row], {name: [10 * int(row)]})
    lease = table.stream("all", rows=6).next()
    assert all(lease.batch[name].array.tolist() == [0, 10, 20, 30, 40, 50] for name in "abc")


# Tasks that begin anew


def test_a_reset_makes_the_same_rows_come_again(table):
    for name in ("judge", "other"):
        table.task(name, reads=("tokens",), max_attempts=2)
    rows = put(table, 4)
    stream = table.stream("judge", rows=2)
    stream.next().done()
    held = stream.next()
    table.reset("judge")
    counts = table.status().tasks["judge"]
    assert (counts.waiting, counts.leased, counts.done) == (4, 0, 0)
    for call in (held.done, held.release, lambda: held.extend(1), lambda: held.drop(rows[2:], "x")):
        with pytest.raises(LeaseLost):
            call()
    again = table.stream("judge", rows=4).next()
    assert (again.rows.tolist(), again.attempt) == (rows.tolist(), 1)


def test_leases_are_acknowledged_together_and_a_lost_one_among_them_is_told(table):
    table.task("train", reads=("tokens",), durable=True)
    put(table, 6)
    stream = table.stream("train", rows=2)
    first, second, third = stream.next(), stream.next(), stream.next()
    second.done(step=1, others=[first])
    assert table.status().tasks["train"].done == 4
    table.commit("train", 1)
    assert (table.ledger().done, table.ledger().live) == (4, 2)
    with pytest.raises(LeaseLost):
        third.done(step=2, others=[first])
    assert table.status().tasks["train"].done == 6


def test_rows_wait_for_a_task_that_was_reset(table):
    for name, durable in (("judge", False), ("train", True), ("other", False)):
        table.task(name, reads=("tokens",), durable=durable)
    put(table, 2)
    table.stream("judge", rows=2).next().done()
    table.stream("train", rows=2).next().done(step=1)
    table.commit("train", 1)
    for name in ("judge", "train"):
        table.reset(name)
    table.stream("other", rows=2).next().done()
    assert (table.ledger().live, table.ledger().done) == (2, 0)
    table.stream("train", rows=2).next().done(step=0)
    table.commit("train", 0)
    assert table.ledger().live == 2
    table.stream("judge", rows=2).next().done()
    assert (table.ledger().done, table.status().bytes) == (2, 0)


def test_a_reset_wakes_who_waits(table, pool):
    table.task("judge", reads=("tokens",))
    table.task("other", reads=("tokens",))
    put(table, 2)
    stream = table.stream("judge", rows=2)
    stream.next().done()
    wait = pool.submit(stream.next)
    table.reset("judge")
    assert wait.result().rows.tolist() == [0, 1]
    with pytest.raises(SchemaError, match="no task 'nope'"):
        table.reset("nope")


# Ends


def test_a_sealed_table_is_draining_until_its_rows_have_gone(table):
    table.task("judge", reads=("tokens",))
    put(table, 2)
    assert table.status().state == "open"
    table.seal()
    assert (table.status().state, table.status().sealed) == ("draining", True)
    for lease in table.stream("judge", rows=1):
        lease.done()
    assert table.status().state == "drained"


def test_a_consumer_does_not_stop_while_rows_are_unwritten(table, pool):
    table.task("judge", reads=("text",))
    rows = put(table, 3)
    table.seal()
    stream = table.stream("judge", rows=2)
    wait = pool.submit(lambda: [lease.rows.tolist() for lease in each_done(stream)])
    for row in rows[::-1]:
        table.write([row], {"text": ["x"]})
    assert sorted(row for batch in wait.result() for row in batch) == rows.tolist()


def each_done(stream):
    for lease in stream:
        lease.done()
        yield lease


def test_dropping_a_table_ends_its_streams_and_frees_it(queue, table, pool):
    table.task("judge", reads=("tokens",))
    table.task("late", reads=("text",))
    rows = put(table, 3)
    stream, late = table.stream("judge", rows=2), table.stream("late", rows=1)
    held, wait = stream.next(), pool.submit(late.next)
    queue.drop_table("train")
    assert isinstance(wait.exception(), QueueClosed)
    for each in (stream, late):
        with pytest.raises(QueueClosed, match="table 'train' was dropped"):
            each.next()
        each.close()
    for call in (held.done, held.release, lambda: held.extend(1), lambda: table.write(rows, {"text": ["a"] * 3}, held)):
        with pytest.raises(LeaseLost):
            call()
    for call in (table.status, lambda: put(table, 1), lambda: table.read(rows, ["tokens"]), table.drop_table):
        with pytest.raises(SchemaError, match="no table 'train'"):
            call()
    assert (queue.status().tables, queue.status().streams) == ({}, 0)


def test_a_put_that_waits_for_room_learns_that_the_table_is_dropped(queue, pool):
    small = queue.create_table("small", Schema({"x": "int64"}), max_rows=1)
    small.put({"x": [1]})
    wait = pool.submit(small.put, {"x": [2]})
    while not small.status().waiting_puts:
        pass
    small.drop_table()
    assert isinstance(wait.exception(), QueueClosed)
    assert "was dropped" in str(wait.exception())


def test_a_table_of_the_same_name_knows_nothing_of_the_old_one(queue, table):
    table.task("judge", reads=("tokens",))
    rows = put(table, 3)
    stream = table.stream("judge", rows=2)
    held = stream.next()
    table.drop_table()
    again = queue.create_table("train", Schema({"x": "int64"}))
    again.task("judge", reads=("x",))
    new = again.put({"x": np.arange(5)})
    assert new.tolist() == [3, 4, 5, 6, 7]
    lease = again.stream("judge", rows=5).next()
    with pytest.raises(LeaseLost):
        held.done()
    with pytest.raises(QueueClosed):
        stream.next()
    stream.close()
    with pytest.raises(RowGone):
        again.read(rows, ["x"])
    again.drop(rows, "late")
    lease.done()
    assert (again.ledger().done, again.ledger().dropped, again.status().bytes) == (5, {}, 0)


# Limits


def test_writes_beyond_the_limit_hold_back_later_puts_and_are_seen(queue, pool):
    table = queue.create_table("small", Schema({"x": "int64", "text": "string"}), max_bytes=2000)
    table.task("judge", reads=("text",))
    rows = table.put({"x": np.arange(4)})
    table.write(rows, {"text": ["a" * 1000] * 4})
    status = table.status()
    assert status.bytes > status.max_bytes == 2000
    wait = pool.submit(table.put, {"x": [5]})
    while not table.status().waiting_puts:
        pass
    table.write(rows, {"text": ["a" * 1000] * 4})
    with pytest.raises(CellConflict):
        table.write(rows, {"text": ["b" * 1000] * 4})
    table.stream("judge", rows=4).next().done()
    assert wait.result().tolist() == [4]
    assert table.status().waiting_puts == 0
