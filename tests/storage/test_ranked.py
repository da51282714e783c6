import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncflow.storage import Batch
from tests.storage.stores import admit, lease, rows_of, store_of

KEYS = st.lists(st.lists(st.integers(-3, 3), min_size=1, max_size=9), min_size=1, max_size=6)


def test_the_newest_versions_come_first_by_their_oldest_token():
    store = store_of("freshest", version="versions")
    admit(store, versions=[np.array(each, np.int32) for each in ([5, 1], [3], [4, 4], [3, 9])])
    assert [rows_of(lease(store, rows=2)) for _ in range(3)] == [[2, 1], [3, 0], None]


def test_what_comes_later_with_a_higher_priority_overtakes():
    store = store_of("priority", priority="weight")
    rows = admit(store, x=np.arange(6))
    store.write(rows[:4], Batch({"weight": np.array([1, 3, np.nan, 2], np.float32)}))
    assert rows_of(lease(store, rows=1)) == [1]
    store.write(rows[4:], Batch({"weight": np.array([2, 9], np.float32)}))
    assert rows_of(lease(store, rows=8, partial=True)) == [5, 3, 4, 0, 2]


@settings(max_examples=60, deadline=None)
@given(KEYS, st.data())
def test_the_highest_come_first_and_ties_in_row_order(parts, data):
    store, waiting, held = store_of("priority", priority="weight"), {}, []
    for keys in parts:
        rows = admit(store, weight=np.array(keys, np.float32))
        waiting |= dict(zip(rows.tolist(), keys, strict=True))
        if held and data.draw(st.booleans()):
            grant = held.pop()
            store.ledger.release(grant.id, 0.0)
            waiting |= dict(zip(grant.rows.tolist(), grant.keys, strict=True))
        gone = data.draw(st.sets(st.sampled_from(sorted(waiting)), max_size=3)) if waiting else set()
        store.ledger.drop(np.array(sorted(gone), np.int64), "gone")
        waiting = {row: key for row, key in waiting.items() if row not in gone}
        count = data.draw(st.integers(1, 5))
        expected = sorted(waiting, key=lambda row: (-waiting[row], row))[:count]
        grant = lease(store, rows=count, partial=True)
        assert (rows_of(grant) or []) == expected
        if grant is not None:
            held.append(Held(grant, [waiting.pop(row) for row in expected]))


class Held:
    """A lease, and the keys of its rows."""

    def __init__(self, grant, keys):
        self.id, self.rows, self.keys = grant.id, grant.rows, keys


def test_what_is_kept_does_not_grow_with_the_rows_that_went():
    store = store_of("priority", priority="weight")
    random = np.random.default_rng(0)
    for _ in range(60):
        admit(store, weight=random.random(50).astype(np.float32))
        store.ledger.finish(lease(store, rows=50).id, 0.0)
    runs = store.ledger.tasks["it"].sampler._runs
    assert len(runs) == 0
    admit(store, weight=np.ones(1000, np.float32))
    for each in range(200):
        store.ledger.drop(admit(store, weight=np.full(1, each, np.float32)), "gone")
    assert len(runs := store.ledger.tasks["it"].sampler._runs) < 12
    assert sum(len(run.ids) for run in runs) < 1300
