import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncflow.storage import Batch
from asyncflow.storage.sampler import Wish
from tests.storage.stores import admit, lease, rows_of, store_of

BALANCED = {"sampler": "token_balanced", "tokens": ("ids",), "budget": 100}


def lengths(*each):
    return [np.arange(length) for length in each]


def take(store, rank, **wish):
    return lease(store, holder=10 + rank, rank=rank, **wish)


def step_of(store, ranks, **wish):
    """Return the micro-batches of each rank, for as long as there are any of the first step."""
    taken = {}
    for rank in range(ranks):
        first = grant = take(store, rank, ranks=ranks, **wish)
        taken[rank] = [grant]
        for _ in range(first.part.count - 1):
            taken[rank].append(take(store, rank, ranks=ranks, **wish))
    return taken


def test_every_rank_gets_as_many_micro_batches_and_every_row_comes_once():
    store = store_of(**BALANCED)
    random = np.random.default_rng(1)
    admit(store, ids=lengths(*random.integers(1, 90, 64)))
    taken = step_of(store, 4, rows=64)
    assert len({len(grants) for grants in taken.values()}) == 1
    rows = np.concatenate([grant.rows for grants in taken.values() for grant in grants])
    assert sorted(rows) == list(range(64))
    tokens = store.ledger.traits.tokens(store.ledger.tasks["it"].spec.choice, np.arange(64))
    sums = [sum(tokens[grant.rows].sum() for grant in grants) for grants in taken.values()]
    assert max(sums) <= 1.05 * np.mean(sums)
    assert all(tokens[grant.rows].sum() <= 100 for grants in taken.values() for grant in grants)
    for grants in taken.values():
        assert [(grant.part.step, grant.part.number) for grant in grants] == [(1, n) for n in range(len(grants))]


@pytest.mark.parametrize("split", [False, True])
def test_groups_stay_whole_where_asked(split):
    store = store_of(**BALANCED)
    admit(store, ids=lengths(90, 10, 10, 10, 10, 10, 50, 50, 5), group_id=[1, 1, 2, 2, 3, 3, 4, 4, 9])
    taken = step_of(store, 2, groups=4, split=split)
    parts = [set(grant.rows.tolist()) for grants in taken.values() for grant in grants]
    assert set().union(*parts) == set(range(8)), "four whole groups, and no part of a fifth"
    whole = all({row, row + 1} <= part or not {row, row + 1} & part for part in parts for row in (0, 2, 4, 6))
    assert whole is not split


def test_no_step_without_enough_rows_and_one_plan_for_all():
    store = store_of(**BALANCED)
    admit(store, ids=lengths(1, 2, 3))
    assert take(store, 1, ranks=2, rows=4) is None
    admit(store, ids=lengths(4, 5, 6, 7, 8))
    second, first = take(store, 1, ranks=2, rows=4), take(store, 0, ranks=2, rows=4)
    assert sorted([*first.rows, *second.rows]) == [0, 1, 2, 3]
    assert (first.part.step, second.part.step) == (1, 1)
    assert take(store, 0, ranks=2, rows=4).part.step == 2


def test_empty_micro_batches_make_the_count_equal():
    store = store_of(**BALANCED)
    admit(store, ids=lengths(60, 70, 80))
    store.ledger.seal()
    taken = step_of(store, 2, rows=8)
    sizes = sorted(len(grant.rows) for grants in taken.values() for grant in grants)
    assert sizes == [0, 1, 1, 1]
    assert store.ledger.exhausted("it", 11, wish_of(1, 2, rows=8))


def wish_of(rank, ranks, **wish):
    return Wish(rank=rank, ranks=ranks, **wish)


def test_what_a_rank_leaves_comes_to_its_successor_in_its_order():
    store = store_of(**BALANCED)
    admit(store, ids=lengths(*[60] * 8))
    first, second = take(store, 0, ranks=2, rows=8), take(store, 0, ranks=2, rows=8)
    other = take(store, 1, ranks=2, rows=8)
    store.ledger.abandon(10, counted=True)
    again = [take(store, 0, ranks=2, rows=8) for _ in range(2)]
    assert [rows_of(grant) for grant in again] == [rows_of(first), rows_of(second)]
    assert [grant.attempt for grant in again] == [2, 2]
    assert not set(other.rows) & set(first.rows)


def test_rows_dropped_meanwhile_leave_the_count_as_it_is():
    store = store_of(**BALANCED)
    rows = admit(store, ids=lengths(*[60] * 8))
    first = take(store, 0, ranks=2, rows=8)
    store.ledger.drop(rows, "gone")
    left = [take(store, 0, ranks=2, rows=8) for _ in range(first.part.count - 1)]
    assert [len(grant.rows) for grant in left] == [0, 0, 0]
    store.ledger.finish(first.id, 0.0)


def test_another_form_of_steps_divides_anew_what_was_not_handed_out():
    store = store_of(**BALANCED)
    admit(store, ids=lengths(*[60] * 8))
    held = take(store, 0, ranks=2, rows=8)
    taken = step_of(store, 1, rows=7)
    store.ledger.release(held.id, 0.0)
    assert sorted(row for grant in taken[0] for row in grant.rows) == sorted(set(range(8)) - set(held.rows.tolist()))
    admit(store, ids=lengths(*[1] * 6))
    assert held.rows[0] in np.concatenate([grant.rows for grant in step_of(store, 1, rows=7)[0]])


def test_a_rewind_begins_with_a_whole_step():
    store = store_of(durable=True, **BALANCED)
    admit(store, ids=lengths(*[60] * 8))
    store.ledger.finish(take(store, 0, ranks=2, rows=8).id, 0.0, step=1)
    store.ledger.rewind("it", 0)
    taken = step_of(store, 2, rows=8)
    assert sorted(row for grants in taken.values() for grant in grants for row in grant.rows) == list(range(8))


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 150), min_size=1, max_size=40), st.integers(1, 4), st.integers(1, 9), st.data())
def test_every_row_comes_to_one_rank_whatever_fails(sizes, ranks, rows, data):
    store = store_of(**BALANCED)
    admit(store, ids=lengths(*sizes))
    store.ledger.seal()
    counts, over = [0] * ranks, 0
    while over < ranks:
        over = 0
        for rank in range(ranks):
            grant = take(store, rank, ranks=ranks, rows=rows)
            if grant is None:
                assert store.ledger.exhausted("it", 10 + rank, wish_of(rank, ranks, rows=rows))
                over += 1
            elif data.draw(st.booleans()) and grant.attempt < 3:
                store.ledger.release(grant.id, 0.0, counted=True)
            else:
                store.ledger.finish(grant.id, 0.0)
                counts[rank] += 1
    assert store.ledger.done == len(sizes)
    assert len(set(counts)) == 1


def test_ordered_steps_pass_no_group_over():
    store = store_of(**BALANCED, ordered=True)
    late = admit(store, group_id=[1, 1])
    admit(store, ids=lengths(5, 6, 7, 8), group_id=[2, 2, 3, 3])
    assert take(store, 0, ranks=2, groups=1, split=True) is None
    store.write(late, Batch({"ids": lengths(3, 4)}))
    for expected in ([0, 1], [2, 3], [4, 5]):
        shares = [rows_of(take(store, rank, ranks=2, groups=1, split=True)) for rank in range(2)]
        assert sorted(row for share in shares for row in share) == expected
        assert all(shares)
