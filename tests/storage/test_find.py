"""Rows that are looked for by their group, over every transport."""

import numpy as np

from asyncflow.storage import Schema


def test_living_rows_are_found_by_group_with_what_they_have(queue):
    table = queue.create_table("t", Schema({"x": "int64", "y": "int64"}))
    rows = table.put({"x": np.arange(5), "group_id": np.array([7, 3, 7, 1 << 61, 3])})
    table.write(rows[[2, 3]], {"y": [1, 2]})
    table.drop(rows[[1]], "test")
    found = table.find([3, 7, 7, 99])
    assert (found.rows.tolist(), found.groups.tolist()) == ([4, 0, 2], [3, 7, 7])
    assert (found.has(["x"]).tolist(), found.has(["x", "y"]).tolist()) == ([True] * 3, [False, False, True])
    everything = table.find()
    assert (everything.rows.tolist(), everything.groups.tolist()) == ([0, 2, 3, 4], [7, 7, 1 << 61, 3])
    assert [len(table.find([])), len(table.find([5]))] == [0, 0]


def test_finding_consumes_nothing_and_forgets_what_has_gone(queue):
    table = queue.create_table("t", Schema({"x": "int64"}))
    table.task("all", reads=("x",))
    rows = table.put({"x": np.arange(3000)}, repeat=1)
    assert table.find().rows.tolist() == rows.tolist()
    lease = table.stream("all", rows=2999).next()
    lease.done()
    assert table.find().rows.tolist() == [2999]
    assert table.find(lease.batch["group_id"].array).rows.tolist() == []
