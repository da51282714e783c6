"""What any store of this kind must do, as far as the tests of the parts do not show it over every transport."""

import threading
from itertools import pairwise

import numpy as np
import pytest

from asyncflow.errors import QueueClosed, RowGone, SchemaError, WaitTimeout
from asyncflow.storage import Schema
from tests.storage.test_queue import put, tokens

# Addressing


@pytest.mark.parametrize("order", [[11, 10, 9], [0, 11, 1, 10], [5], [3, 4, 5, 6], [7, 7, 0, 7], []])
def test_results_follow_the_order_of_the_request(table, order):
    parts = [put(table, count) for count in (3, 5, 4)]
    rows = np.concatenate(parts)
    table.write(rows[::-1], {"text": [f"row {row}" for row in rows[::-1]]})
    batch = table.read(rows[order], ["text", "tokens"])
    assert batch["text"].strings() == [f"row {row}" for row in rows[order]]
    lengths = [*range(1, 4), *range(1, 6), *range(1, 5)]
    assert batch["tokens"].lengths.tolist() == [lengths[each] for each in order]


def test_a_handle_to_a_retired_row_reaches_no_other(table):
    table.task("all", reads=("tokens",))
    old = put(table, 3)
    table.stream("all", rows=3).next().done()
    new = put(table, 3)
    for call in (lambda: table.read(old, ["tokens"]), lambda: table.write(old, {"text": ["x"] * 3})):
        with pytest.raises(RowGone, match="rows 0, 1, 2"):
            call()
    with pytest.raises(RowGone, match="row 1"):
        table.read([int(new[0]), 1], ["tokens"])
    table.drop(old, "late")
    assert (table.ledger().live, table.ledger().dropped) == (3, {})


def test_tables_with_rows_of_the_same_number_are_apart(queue, table):
    other = queue.create_table("other", table.schema)
    for each in (table, other):
        each.task("all", reads=("tokens",))
        put(each, 2)
    lease = table.stream("all", rows=2).next()
    table.drop([0], "gone")
    lease.done()
    assert (other.ledger().live, other.status().tasks["all"].waiting) == (2, 2)
    assert table.status().bytes == 0


# Consumption


def test_order_is_put_order_also_after_rows_have_gone(table):
    table.task("all", reads=("tokens",))
    for _ in range(3):
        put(table, 4)
    table.drop([1, 2, 6], "gone")
    stream = table.stream("all", rows=3)
    stream.next().done()
    put(table, 3)
    assert [stream.next().rows.tolist() for _ in range(3)] == [[5, 7, 8], [9, 10, 11], [12, 13, 14]]


def test_a_waiting_consumer_delays_nobody(table, pool):
    table.task("never", reads=("blob",))
    table.task("all", reads=("tokens",))
    waits = [pool.submit(table.stream("never", rows=1).next) for _ in range(3)]
    rows = put(table, 4)
    table.write(rows, {"text": list("abcd")})
    assert table.stream("all", rows=4).next().rows.tolist() == rows.tolist()
    assert not any(wait.done() for wait in waits)
    table.write(rows[1:], {"blob": [b"1", b"2", b"3"]})
    assert sorted(int(wait.result().rows[0]) for wait in waits) == rows[1:].tolist()


def test_a_batch_is_what_was_leased_whatever_becomes_of_its_rows(table):
    table.task("all", reads=("tokens",))
    table.put({"tokens": tokens(3, 4, 5, 6)})
    stream = table.stream("all", rows=2, credit=2)
    first = stream.next()
    table.drop(np.arange(4), "gone")
    assert table.status().bytes == 0
    put(table, 4)
    second = stream.next()
    assert [cell.tolist() for cell in second.batch["tokens"]] == [cell.tolist() for cell in tokens(5, 6)]
    first.done()
    second.done()
    assert table.ledger().done == 0


# Writing


def test_what_was_put_is_seen_by_all_at_once(clients):
    first, second = clients(), clients()
    table = first.create_table("t", Schema({"x": "int64"}))
    other = second.table("t")
    for count in range(1, 20):
        rows = table.put({"x": [count]})
        assert other.read(rows, ["x"])["x"].array.tolist() == [count]
        assert other.ledger().admitted == count


def test_a_full_table_refuses_at_once_on_request(queue):
    table = queue.create_table("small", Schema({"x": "int64"}), max_rows=2)
    table.put({"x": [1, 2]})
    with pytest.raises(WaitTimeout, match="waited for room"):
        table.put({"x": [3]}, timeout=0)
    table.drop([0], "gone")
    assert table.ledger().admitted == 2, "the put that was refused left nothing behind"
    assert table.put({"x": [3]}, timeout=5).tolist() == [2]


# Retiring


def test_dropping_is_idempotent_and_tolerant_and_frees_row_by_row(table):
    rows = put(table, 64, blob=[bytes(1000)] * 64)
    table.drop([*rows[:2], 70, -3], "gone")
    table.drop(rows[:2], "again")
    table.drop([], "nothing")
    assert table.ledger().dropped == {"gone": 2}
    sizes = [table.status().bytes]
    for row in rows[2:]:
        table.drop([row], "gone")
        sizes.append(table.status().bytes)
    assert all(after <= before for before, after in pairwise(sizes))
    assert len(set(sizes)) > 3
    assert sizes[-1] == 0


def test_rows_that_go_are_not_handed_out(table):
    table.task("all", reads=("tokens",))
    table.task("groups", reads=("tokens",), sampler="group")
    put(table, 6, group_id=[1, 1, 2, 2, 3, 3])
    table.drop([0, 2, 3], "gone")
    assert table.stream("all").next().rows.tolist() == [1, 4, 5]
    assert [table.stream("groups", groups=1).next().rows.tolist() for _ in range(2)] == [[1], [4, 5]]


# Behaviour


def test_an_answer_is_never_taken_for_that_of_another_request(table, pool):
    table.task("all", reads=("tokens",))
    stream = table.stream("all", rows=1)
    for _ in range(20):
        with pytest.raises(WaitTimeout):
            stream.next(timeout=0)
    waits = [pool.submit(table.read, put(table, 1, text=[str(each)]), ["text"]) for each in range(20)]
    assert [wait.result()["text"].strings() for wait in waits] == [[str(each)] for each in range(20)]
    assert [int(stream.next().rows[0]) for _ in range(20)] == list(range(20))


def test_a_queue_that_is_closed_says_so_at_every_call(clients):
    queue = clients()
    table = queue.create_table("t", Schema({"x": "int64"}))
    table.task("all", reads=("x",))
    table.put({"x": [1]})
    stream = table.stream("all", rows=1)
    lease = stream.next()
    queue.close()
    calls = (
        queue.status,
        table.status,
        stream.next,
        lease.done,
        table.seal,
        table.drop_table,
        lambda: table.reset("all"),
    )
    for call in calls:
        with pytest.raises(QueueClosed):
            call()
    queue.close()


def test_a_refused_request_leaves_the_connection_as_it_was(table):
    for call in (lambda: table.stream("none"), lambda: table.read([9], ["tokens"]), lambda: table.commit("none", 1)):
        with pytest.raises((SchemaError, RowGone)):
            call()
    assert put(table, 2).tolist() == [0, 1]


def test_rows_that_become_ready_reach_who_waits_whoever_writes_them(clients, pool):
    first, second = clients(), clients()
    table = first.create_table("t", Schema({"x": "int64", "y": "int64"}))
    table.task("all", reads=("x", "y"))
    entered = threading.Event()
    stream = second.table("t").stream("all", rows=2)
    wait = pool.submit(lambda: (entered.set(), stream.next())[1])
    entered.wait()
    rows = table.put({"x": [1, 2]})
    second.table("t").write(rows[:1], {"y": [3]})
    table.write(rows[1:], {"y": [4]})
    assert wait.result().batch["y"].array.tolist() == [3, 4]
