import numpy as np
import pytest

from asyncflow.errors import SchemaError
from asyncflow.storage import Batch
from asyncflow.storage.schema import dtype
from asyncflow.storage.spec import Choice, TaskSpec
from asyncflow.storage.traits import Traits
from tests.storage.stores import admit, store_of

CHOICE = Choice(tokens=("a", "n"), version="v", priority="p")
BATCH = Batch(
    {
        "a": [np.arange(3), np.arange(0), np.arange(5)],
        "n": np.array([10, 20, 30], np.int32),
        "v": [np.array([4, 2, 9]), np.array([], np.int64), np.array([7])],
        "p": np.array([0.5, -1.0, 2.0], np.float32),
    }
)


def traits_of(batch):
    traits = Traits()
    for trait in CHOICE.traits:
        assert traits.watch(trait, dtype(batch[trait[1]].dtype))
    traits.grow(4)
    return traits


def test_tokens_versions_and_priorities_follow_from_cells():
    traits = traits_of(BATCH)
    traits.note(np.array([0, 1, 2]), BATCH)
    rows = np.array([2, 1, 0])
    assert traits.tokens(CHOICE, rows).tolist() == [35, 20, 13]
    assert traits.version(CHOICE, rows).tolist() == [7, np.inf, 2]
    assert traits.priority(CHOICE, rows).tolist() == [2.0, -1.0, 0.5]


def test_rows_of_a_group_share_what_they_share():
    traits = traits_of(BATCH)
    traits.note(np.arange(4), BATCH, places=np.array([0, 0, 2, 2]))
    assert traits.tokens(CHOICE, np.arange(4)).tolist() == [13, 13, 35, 35]


def test_a_trait_that_is_watched_late_is_taken_from_what_is_written():
    store = store_of("fifo")
    rows = admit(store, weight=np.array([3.0, 1.0], np.float32))
    late = admit(store, x=[7])
    choice = Choice(priority="weight")
    store.ledger.drop(rows[:1], "gone")
    store.declare("late", TaskSpec((), "priority", choice=choice))
    assert store.ledger.traits.priority(choice, rows[1:]).tolist() == [1.0]
    store.write(late, Batch({"weight": np.array([5.0], np.float32)}))
    assert store.ledger.traits.priority(choice, late).tolist() == [5.0]


@pytest.mark.parametrize(
    ("trait", "kind"),
    [
        (("tokens", "c"), "float32"),
        (("tokens", "c"), "string"),
        (("version", "c"), "list<float32>"),
        (("version", "c"), "bfloat16"),
        (("priority", "c"), "list<float32>"),
        (("priority", "c"), "float32[2]"),
    ],
)
def test_a_column_that_cannot_tell_is_refused(trait, kind):
    with pytest.raises(SchemaError, match=f"column 'c' is .*cannot tell the {trait[0]}"):
        Traits().watch(trait, dtype(kind))


@pytest.mark.parametrize(
    ("sampler", "choice", "problem"),
    [
        ("best", {}, "no sampler 'best'; there are fifo, group, ordered, token_balanced"),
        ("token_balanced", {"tokens": ("ids",)}, "needs budget"),
        ("freshest", {}, "needs version"),
        ("priority", {"priority": "weight", "seed": 3}, "does not use seed"),
        ("fifo", {"budget": 3}, "does not use budget"),
        ("replay", {}, "needs uses"),
        ("replay", {"uses": 2, "max_age": 1}, "max_age needs the column of the version"),
        ("replay", {"uses": 2, "share": 1.0}, "share lies between 0 and 1"),
        ("token_balanced", {"tokens": ("ids",), "budget": -1}, "positive"),
        ("freshest", {"version": "nope"}, "no column 'nope'"),
    ],
)
def test_a_choice_that_makes_no_sense_is_refused(sampler, choice, problem):
    with pytest.raises(SchemaError, match=problem):
        store_of(sampler, **choice)
