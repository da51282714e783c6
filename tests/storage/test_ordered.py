"""Groups in the order of their admission, whatever is finished first."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncflow.errors import WaitTimeout
from asyncflow.storage import Schema, TransferQueue

GROUPS, SIZE = 6, 2


def ordered(queue):
    table = queue.create_table("t", Schema({"x": "int64", "y": "int64"}))
    table.task("use", ["y"], sampler="ordered", durable=True)
    return table


def batch(stream):
    """Return the groups of the next batch, which is done then, or none if there is no batch yet."""
    try:
        lease = stream.next(timeout=0)
    except WaitTimeout:
        return []
    lease.done(step=1)
    return list(dict.fromkeys(lease.batch["group_id"].array.tolist()))


def due(groups, size):
    """Return the first groups if all of their living rows are written; `groups` has those that are blocked."""
    first = list(groups)[:size]
    return first if len(first) == size and not any(groups[group] for group in first) else []


@settings(max_examples=40, deadline=None)
@given(
    order=st.permutations(range(GROUPS * SIZE)),
    lost=st.sets(st.integers(0, GROUPS * SIZE - 1)),
    size=st.integers(1, 3),
)
def test_what_comes_depends_on_what_was_admitted_and_dropped_alone(order, lost, size):
    with TransferQueue.open() as queue:
        table = ordered(queue)
        rows = table.put({"x": np.arange(GROUPS)}, repeat=SIZE)
        living = {group: set(range(group * SIZE, (group + 1) * SIZE)) for group in range(GROUPS)}
        blocked = {group: set(members) for group, members in living.items()}
        stream = table.stream("use", groups=size)
        for row in order:
            blocked[row // SIZE].discard(row)
            if row in lost:
                table.drop(rows[[row]], "lost")
                living[row // SIZE].discard(row)
            else:
                table.write(rows[[row]], {"y": [row]})
            blocked = {group: left for group, left in blocked.items() if living[group]}
            while expected := due(blocked, size):
                assert batch(stream) == expected
                blocked = {group: left for group, left in blocked.items() if group not in expected}
            assert batch(stream) == []


def test_what_is_under_lease_is_passed_over_and_comes_back_first(queue):
    table = ordered(queue)
    table.put({"x": np.arange(4), "y": np.arange(4)})
    one, two = (table.stream("use", groups=1) for _ in range(2))
    first, second = one.next(), two.next()
    assert [*first.batch["group_id"].array, *second.batch["group_id"].array] == [0, 1]
    first.release()
    assert batch(two) == [0]
    second.done(step=2)
    table.commit("use", 1)
    table.rewind("use", 1)
    assert [batch(one) for _ in range(3)] == [[1], [2], [3]]


def test_a_late_group_holds_back_those_after_it_until_it_is_dropped(queue):
    table = ordered(queue)
    rows = table.put({"x": np.arange(300)})
    table.write(rows[1:], {"y": rows[1:]})
    stream = table.stream("use", groups=280)
    with pytest.raises(WaitTimeout, match="'use'"):
        stream.next(timeout=0.05)
    table.drop(rows[:1], "late")
    assert batch(stream) == rows[1:281].tolist()
    table.seal()
    assert batch(stream) == rows[281:].tolist()
    assert stream.next() is None
