"""The samplers that choose by what is in a row, over every transport."""

import numpy as np
import pytest

from asyncflow.errors import LeaseLost, SchemaError, WaitTimeout
from asyncflow.storage import Schema

COLUMNS = {"ids": "list<int64>", "version": "list<int64>", "value": "float32"}


@pytest.fixture
def table(queue):
    return queue.create_table("t", Schema(COLUMNS))


def lengths(*each):
    return [np.arange(length) for length in each]


def test_ranks_get_their_micro_batches_of_one_plan(clients):
    queues = [clients() for _ in range(2)]
    table = queues[0].create_table("t", Schema(COLUMNS))
    table.task("train", ("ids",), "token_balanced", tokens="ids", budget=100, durable=True)
    table.put({"ids": lengths(90, 40, 30, 20, 60, 70, 10, 55)})
    ranks = [queue.table("t").stream("train", rows=8, rank=rank, ranks=2) for rank, queue in enumerate(queues)]
    first = [stream.next() for stream in ranks]
    assert first[0].parts == first[1].parts == 2
    leases = [*first, *(stream.next() for stream in ranks)]
    assert [(lease.step, lease.part) for lease in leases] == [(1, 0), (1, 0), (1, 1), (1, 1)]
    assert sorted(row for lease in leases for row in lease.rows) == list(range(8))
    assert all(lease.batch["ids"].lengths.sum() <= 100 for lease in leases)
    sums = [sum(lease.batch["ids"].lengths.sum() for lease in leases[rank::2]) for rank in range(2)]
    assert abs(sums[0] - sums[1]) <= 0.05 * sum(sums)
    for lease in leases:
        lease.done(step=1)
    table.commit("train", 1)
    assert table.status().bytes == 0


def test_a_successor_gets_what_its_rank_left(table):
    table.task("train", (), "token_balanced", tokens="ids", budget=10)
    table.put({"ids": lengths(*[10] * 4)})
    dead, other = (table.stream("train", rows=4, rank=rank, ranks=2) for rank in range(2))
    lost, kept = dead.next(), other.next()
    dead.close()
    with pytest.raises(LeaseLost):
        lost.done()
    table.seal()
    kept.done()
    other.next().done()
    assert other.next() is None, "what is left is for the other rank"
    for lease in table.stream("train", rows=4, rank=0, ranks=2):
        lease.done()
    assert (table.ledger().done, table.ledger().live) == (4, 0)


def test_a_rank_without_rows_gets_empty_micro_batches(table):
    table.task("train", ("ids",), "token_balanced", tokens=["ids"], budget=100)
    table.put({"ids": lengths(500)})
    table.seal()
    leases = [table.stream("train", rows=4, rank=rank, ranks=3).next() for rank in range(3)]
    assert [len(lease) for lease in leases] == [1, 0, 0]
    assert leases[2].batch["ids"].dtype == "list<int64>"
    for lease in leases:
        lease.done()
    assert table.ledger().done == 1


def test_ranks_that_do_not_agree_are_refused(table):
    table.task("train", ("ids",), "token_balanced", tokens="ids", budget=10)
    table.task("plain", ("ids",))
    table.stream("train", rows=4, rank=0, ranks=2)
    for wish in ({"rows": 5, "rank": 1, "ranks": 2}, {"groups": 4, "rank": 1, "ranks": 2}, {"rows": 4, "ranks": 3}):
        with pytest.raises(SchemaError, match="share their steps"):
            table.stream("train", **wish)
    for wish in ({"rows": 4}, {"rows": 4, "rank": 2, "ranks": 2}, {"rows": 4, "groups": 1, "ranks": 2}):
        with pytest.raises(SchemaError):
            table.stream("train", **wish)
    for wish in ({"rows": 4, "ranks": 2}, {"rows": 4, "rank": 1}, {"rows": 4, "split": True}):
        with pytest.raises(SchemaError):
            table.stream("plain", **wish)


def test_the_newest_come_first(table):
    table.task("train", ("ids",), "freshest", version="version")
    rows = table.put({"ids": lengths(1, 2, 3)})
    with pytest.raises(WaitTimeout, match="without version"):
        table.stream("train", rows=1).next(timeout=0.02)
    table.write(rows, {"version": [np.array([3, 3]), np.array([4, 5]), np.array([1, 9])]})
    lease = table.stream("train", rows=3).next()
    assert lease.rows.tolist() == [1, 0, 2]
    assert "version" not in lease.batch


def test_the_highest_priority_comes_first(table):
    table.task("judge", ("ids",), "priority", priority="value")
    table.put({"ids": lengths(1, 2, 3), "value": [1.0, 5.0, 1.0]})
    stream = table.stream("judge", rows=1)
    assert [int(stream.next().rows[0]) for _ in range(3)] == [1, 0, 2]


def test_rows_are_used_again_within_bounds(table):
    table.task("train", ("ids",), "replay", uses=2, version="version", max_age=1, seed=5, durable=True)
    stream, seen = table.stream("train", rows=4), []
    for version in range(6):
        table.put({"ids": lengths(1, 2), "version": [np.array([version])] * 2})
        lease = stream.next(timeout=5) if version else table.stream("train", rows=4, partial=True).next()
        trailing = version - np.array([cell[0] for cell in table.read(lease.rows, ["version"])["version"]])
        assert trailing.max() <= 1
        seen += lease.rows.tolist()
        lease.done(step=version)
        table.commit("train", version)
    table.seal()
    assert np.bincount(seen).max() == 2
    counts = table.ledger()
    assert (counts.done, counts.live, table.status().bytes) == (12, 0, 0)


def test_a_table_without_such_tasks_keeps_no_traits(table):
    table.task("train", ("ids",))
    with pytest.raises(SchemaError, match="cannot tell the priority"):
        table.task("bad", (), "priority", priority="ids")
    with pytest.raises(SchemaError, match="needs budget, tokens"):
        table.task("bad", (), "token_balanced")
    assert set(table.status().tasks) == {"train"}
