import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncflow.storage.replay import Pool
from tests.storage.stores import admit, lease, rows_of, store_of


def versions(*each):
    return [np.array([version], np.int32) for version in each]


def use(store, count, step=None, **wish):
    grant = lease(store, rows=count, **wish)
    if grant is not None:
        store.ledger.finish(grant.id, 0.0, step)
    return rows_of(grant)


def test_new_rows_come_with_a_share_of_old_ones_each_used_so_often():
    store = store_of("replay", uses=3, seed=7)
    admit(store, x=np.arange(200))
    seen = [row for _ in range(50) for row in use(store, 4)[:4] if row is not None]
    times = np.bincount(seen, minlength=200)
    assert times.max() == 3
    assert sorted(set(seen)) == list(range(len(set(seen)))), "new rows in row order"
    assert len(set(seen)) == 4 + 49 * 2
    assert store.ledger.done == np.count_nonzero(times == 3)
    assert store.ledger.tasks["it"].done == len(set(seen))


def test_the_same_seed_draws_the_same_rows():
    def draws(seed):
        store = store_of("replay", uses=2, seed=seed)
        admit(store, x=np.arange(60))
        return [use(store, 6) for _ in range(12)]

    assert draws(3) == draws(3) != draws(4)


def test_no_batch_without_new_rows_and_the_end_lets_all_go():
    store = store_of("replay", uses=5)
    admit(store, x=np.arange(8))
    assert [len(use(store, 4)) for _ in range(3)] == [4, 4, 4]
    assert use(store, 8) is None
    assert store.ledger.live == 8
    store.ledger.seal()
    assert use(store, 4) is None
    assert store.ledger.exhausted("it", 1)
    assert (store.ledger.live, store.ledger.done) == (0, 8)


def test_what_is_too_old_is_not_used_again_and_retires():
    store = store_of("replay", uses=9, version="versions", max_age=1)
    admit(store, versions=versions(1, 1, 2, 2))
    use(store, 4)
    assert store.ledger.live == 4
    admit(store, versions=versions(3))
    assert (store.ledger.live, store.ledger.done) == (3, 2)
    assert set(use(store, 2)) <= {2, 3, 4}
    grant = lease(store, rows=1, partial=True)
    assert grant is None


def test_one_that_grows_old_under_a_lease_retires_with_it():
    store = store_of("replay", uses=9, version="versions", max_age=0)
    admit(store, versions=versions(1))
    grant = lease(store, rows=1)
    admit(store, versions=versions(2))
    store.ledger.finish(grant.id, 0.0)
    assert store.ledger.done == 1


def test_a_failed_use_is_not_counted_and_comes_again():
    store = store_of("replay", uses=2)
    admit(store, x=[0])
    for attempt in (1, 2):
        grant = lease(store, rows=1)
        assert grant.attempt == attempt
        store.ledger.release(grant.id, 0.0, counted=True)
    use(store, 1)
    admit(store, x=[1])
    assert sorted(use(store, 2)) == [0, 1]
    assert store.ledger.done == 1


@pytest.mark.parametrize("committed", [0, 2])
def test_uses_are_taken_back_by_a_rewind(committed):
    store = store_of("replay", durable=True, uses=2)
    admit(store, x=np.arange(8))
    assert use(store, 2, step=1) == [0, 1]
    second = use(store, 4, step=2)
    third = use(store, 4, step=3)
    store.ledger.commit("it", committed)
    done = store.ledger.done
    assert done == (2 if committed else 0)
    store.ledger.rewind("it", 2)
    for _ in range(2):
        assert set(use(store, 2, step=3)[:1]) <= {*third, 4, 5}
    store.ledger.rewind("it", 2)
    assert store.ledger.tasks["it"].done == len({0, 1, *second})


def test_a_durable_row_goes_with_the_step_that_used_it_last():
    store = store_of("replay", durable=True, uses=2)
    admit(store, x=np.arange(3))
    use(store, 1, step=1)
    assert sorted(use(store, 2, step=2)) == [0, 1]
    store.ledger.commit("it", 1)
    assert store.ledger.done == 0
    store.ledger.commit("it", 2)
    assert store.ledger.done == 1
    use(store, 2, step=3)
    store.ledger.seal()
    store.ledger.commit("it", 3)
    assert (store.ledger.done, store.ledger.live) == (3, 0)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 30)), max_size=40), st.integers(0, 9))
def test_a_pool_is_a_set_from_which_rows_are_drawn(actions, seed):
    pool, model, random = Pool(0), set(), np.random.default_rng(seed)
    pool.grow(40)
    for adds, row in actions:
        if adds and row not in model:
            pool.add(np.array([row]))
            model.add(row)
        elif not adds:
            gone = [each for each in range(row, row + 4) if each in model]
            pool.remove(np.array(gone, np.int64))
            model -= set(gone)
        assert set(pool.rows) == model
        for count in {0, len(model) // 3, len(model)}:
            drawn = pool.draw(count, random).tolist()
            assert len(set(drawn)) == count
            assert set(drawn) <= model
