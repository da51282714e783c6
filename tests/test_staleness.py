"""The two gates against random schedules: what is admitted, what is trained, and that it always goes on."""

from dataclasses import dataclass, field
from typing import get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncflow.errors import StalenessExceeded
from asyncflow.staleness import StalenessController, check, gate, staleness, waited
from asyncflow.storage.batch import Column
from asyncflow.types import StalePolicy

STEP, ROWS, STEPS = 3, 2, 6


def ragged(rows: list[list[int]], dtype: str) -> Column:
    return Column.of(f"list<{dtype}>", [np.array(row, dtype=dtype) for row in rows])


# Admission


def test_a_bound_of_zero_admits_one_step_at_version_zero():
    control = StalenessController(groups_per_step=4, steps=3)
    assert control.room() == 4
    control.admit(4)
    assert control.room() == 0
    control.advance(1)
    assert control.room() == 4


def test_no_more_is_admitted_than_the_run_needs():
    control = StalenessController(groups_per_step=4, steps=2, bound=5)
    assert control.room() == 8
    control.admit(8)
    control.advance(1)
    assert control.room() == 0


def test_lost_groups_are_replaced():
    control = StalenessController(groups_per_step=4, steps=1)
    control.admit(4)
    control.give_back(2)
    assert control.room() == 2


def test_admitting_more_than_there_is_room_for_is_refused():
    control = StalenessController(groups_per_step=4, steps=1)
    with pytest.raises(StalenessExceeded, match="5 groups were to be admitted, but there is room for 4"):
        control.admit(5)


def test_admission_counts_from_the_version_that_a_resumed_run_starts_with():
    control = StalenessController(groups_per_step=2, steps=10, bound=1, first=700)
    assert control.room() == 4


def test_what_is_finished_and_unused_holds_admission_back():
    control = StalenessController(groups_per_step=2, steps=10, bound=4, run_ahead=1)
    assert control.room(finished=1) == 10
    assert control.room(finished=2) == 0


# Consumption


def test_only_trained_tokens_count():
    versions = ragged([[3, 1, 5], [4, 4], []], "int32")
    mask = ragged([[1, 0, 1], [1, 1], []], "uint8")
    assert staleness(versions, mask, 5).tolist() == [2, 1, 0]


def test_placeholders_under_the_mask_cannot_become_the_minimum():
    assert staleness(ragged([[-1, 7]], "int32"), ragged([[0, 1]], "uint8"), 7).tolist() == [0]


def test_exactly_the_bound_is_allowed_and_one_more_is_not():
    check(np.array([10, 11]), np.array([0, 2]), bound=2)
    with pytest.raises(StalenessExceeded, match="row 11 is 3 versions old and max_staleness is 2"):
        check(np.array([10, 11]), np.array([0, 3]), bound=2)


@pytest.mark.parametrize(
    ("policy", "mask", "tokens"),
    [
        ("mask", [[0, 0, 1], [1, 1], [0], []], 2),
        ("drop", [[0, 0, 0], [1, 1], [0], []], 3),
        ("requeue", [[0, 0, 0], [1, 1], [0], []], 3),
        ("wait", [[1, 1, 1], [1, 1], [0], []], 0),
    ],
)
def test_each_policy_takes_what_is_too_old_out_of_the_loss(policy, mask, tokens):
    versions = ragged([[2, 3, 4], [4, 5], [-1], []], "int32")
    verdict = gate(versions, ragged([[1, 1, 1], [1, 1], [0], []], "uint8"), 5, 1, policy)
    assert [cell.tolist() for cell in verdict.mask] == mask
    assert (verdict.stale.tolist(), verdict.tokens) == ([0], tokens)
    assert verdict.ages.tolist() == {"mask": [1, 1, 0, 0], "wait": [3, 1, 0, 0]}.get(policy, [0, 1, 0, 0])


CELLS = st.lists(st.lists(st.tuples(st.integers(0, 9), st.booleans()), max_size=5), min_size=1, max_size=6)


@given(CELLS, st.integers(0, 9), st.integers(0, 4), st.sampled_from(["mask", "drop", "requeue"]))
def test_nothing_too_old_is_left_and_nothing_young_is_masked(cells, training, bound, policy):
    versions = ragged([[version for version, _ in row] for row in cells], "int32")
    mask = ragged([[int(on) for _, on in row] for row in cells], "uint8")
    verdict = gate(versions, mask, training, bound, policy)
    assert verdict.mask.lengths.tolist() == mask.lengths.tolist()
    assert (verdict.ages <= bound).all()
    for row, (before, after) in enumerate(zip(mask, verdict.mask, strict=True)):
        late = [training - version > bound and on for version, on in cells[row]]
        assert (row in verdict.stale) == any(late)
        gone = np.array(late if policy == "mask" else [on and any(late) for _, on in cells[row]], bool)
        assert (np.where(gone, 0, before) == after).all()


# Both, over random schedules


@dataclass
class Run:
    """An engine of single tokens under both gates; every random choice comes from outside."""

    bound: int
    policy: str
    first: int
    control: StalenessController = field(init=False)
    trained: int = field(init=False)
    applied: int = field(init=False)
    living: dict[int, list[list[int]]] = field(default_factory=dict)
    """Groups that are not trained: the versions of the tokens of each row."""
    lengths: dict[int, int] = field(default_factory=dict)
    steps: list[list[int]] = field(default_factory=list)
    lost: int = 0

    def __post_init__(self) -> None:
        self.control = StalenessController(STEP, STEPS, self.bound, self.first)
        self.trained = self.applied = self.first

    def admit(self, length: int) -> None:
        """Begin as many groups as there is room for."""
        for _ in range(room := self.control.room()):
            group = len(self.lengths)
            self.living[group], self.lengths[group] = [[] for _ in range(ROWS)], 1 + length % 4
        self.control.admit(room)

    def token(self, pick: int) -> None:
        """Draw a token for each row of one group, or of all groups."""
        busy = [group for group in self.living if not self.finished(group)]
        for group in busy if pick % 2 else busy[:1]:
            for row in self.living[group]:
                row.append(self.applied)

    def finished(self, group: int) -> bool:
        return len(self.living[group][0]) >= self.lengths[group]

    def apply(self, _: int) -> None:
        """Let the engine, which may be any number of versions behind, take the newest weights."""
        self.applied = self.trained
        if self.policy == "wait":
            self.control.advance(self.applied)

    def lose(self, pick: int) -> None:
        """Drop all rows of a group, before or after it was finished."""
        if self.living and self.lost < 5:
            self.lost += 1
            self.end(list(self.living)[pick % len(self.living)])

    def end(self, group: int) -> None:
        del self.living[group]
        self.control.give_back(1)

    def train(self, _: int) -> bool:
        """Make a step if there is a batch for it."""
        ready = list(self.living)[:STEP] if self.policy == "wait" else [g for g in self.living if self.finished(g)]
        for group in ready if self.policy in ("drop", "requeue") else []:
            if self.finished(group) and self.judged(group).stale.size == ROWS:
                self.end(group)
        batch = [group for group in ready if group in self.living][:STEP]
        if len(batch) < STEP or not all(self.finished(group) for group in batch):
            return False
        for group in batch:
            check(np.arange(ROWS), self.judged(group).ages, self.bound)
            del self.living[group]
        self.steps.append(batch)
        self.trained += 1
        if self.policy != "wait":
            self.control.advance(self.trained)
        return True

    def judged(self, group: int):
        rows = self.living[group]
        ones = ragged([[1] * len(row) for row in rows], "uint8")
        return gate(ragged(rows, "int32"), ones, self.trained, self.bound, self.policy)


MOVES = st.lists(
    st.tuples(st.sampled_from(["admit", "token", "token", "apply", "lose", "train", "train"]), st.integers(0, 99)),
    min_size=40,
    max_size=80,
)


@settings(max_examples=150, deadline=None)
@given(
    bound=st.integers(0, 3), policy=st.sampled_from(get_args(StalePolicy)), first=st.sampled_from([0, 700]), moves=MOVES
)
def test_no_schedule_breaks_the_bound_and_every_one_ends(bound, policy, first, moves):
    run = Run(bound, policy, first)
    for move, number in moves:
        if len(run.steps) < STEPS:
            getattr(run, move)(number)
        assert len(run.living) <= (bound + 1) * STEP
    for _ in range(400):
        if len(run.steps) == STEPS:
            break
        # What comes first in a run of its own: a step as soon as there is a batch, then tokens, then new groups.
        if not run.train(0):
            run.apply(0)
            run.admit(2)
            run.token(0)
    assert run.trained == first + STEPS, "the schedule is stuck"
    groups = [group for step in run.steps for group in step]
    assert len(groups) == len(set(groups)) == STEP * STEPS
    assert run.control.admitted == len(groups) + run.control.given_back + len(run.living)


def test_the_bound_is_reached_and_not_only_kept():
    run = Run(2, "wait", 0)
    run.admit(0)
    for _ in range(3 * STEP):
        run.token(0)
    assert [bool(run.train(0)) for _ in range(4)] == [True, True, True, False]
    assert run.trained == 3


def test_a_row_has_waited_since_its_newest_trained_token():
    versions = Column.ragged(np.array([3, 5, 4, 4, 1, 9], np.int32), np.array([0, 2, 4, 6, 6]), "list<int32>")
    mask = Column.ragged(np.array([1, 1, 1, 1, 1, 0], np.uint8), np.array([0, 2, 4, 6, 6]), "list<uint8>")
    assert waited(versions, mask, 6).tolist() == [1, 2, 5, 0]
    assert (staleness(versions, mask, 6) - waited(versions, mask, 6)).tolist() == [2, 0, 0, 0]
