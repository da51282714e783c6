"""The ledger and its samplers against a model that is a dictionary and a few loops."""

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from asyncflow.errors import LeaseLost, RowGone, SchemaError
from asyncflow.storage.ledger import Ledger, TaskSpec, listed
from asyncflow.storage.sampler import Wish

A, B = np.uint64(1), np.uint64(2)
READS = {"score": A, "train": A | B}
LEASE_SECONDS, ATTEMPTS = 10.0, 3


def ledger_of(rows=6, group=2, **tasks):
    ledger = Ledger()
    for name, spec in tasks.items():
        ledger.declare(name, spec, A)
    ledger.admit(rows, np.arange(rows) // group, A)
    return ledger


def rows_of(grant):
    return grant.rows.tolist()


class Model:
    """What a row is, kept the simple way."""

    def __init__(self, row, group, columns):
        self.row, self.group, self.columns = row, group, columns
        self.leases = dict.fromkeys(READS, None)
        self.done = dict.fromkeys(READS, False)
        self.attempts = dict.fromkeys(READS, 0)

    def ready(self, task):
        return self.columns & int(READS[task]) == int(READS[task]) and not self.done[task] and self.leases[task] is None


class LedgerMachine(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.ledger, self.now = Ledger(), 0.0
        self.ledger.declare("score", TaskSpec(("a",), "fifo", ATTEMPTS, LEASE_SECONDS), A)
        self.ledger.declare("train", TaskSpec(("a", "b"), "group", ATTEMPTS, LEASE_SECONDS, durable=True), A | B)
        self.live, self.leases, self.over = {}, {}, []
        self.admitted = self.retired = self.committed = 0
        self.dropped, self.steps = {}, {}

    @rule(groups=st.lists(st.integers(0, 5), min_size=1, max_size=6), columns=st.integers(0, 3))
    def admit(self, groups, columns):
        rows = self.ledger.admit(len(groups), np.array(groups), np.uint64(columns))
        assert rows.tolist() == list(range(self.admitted, self.admitted + len(groups)))
        self.admitted += len(groups)
        self.live |= {row: Model(row, group, columns) for row, group in zip(rows.tolist(), groups, strict=True)}

    @precondition(lambda self: self.live)
    @rule(data=st.data(), column=st.sampled_from([1, 2]))
    def write(self, data, column):
        rows = data.draw(st.lists(st.sampled_from(sorted(self.live)), unique=True, max_size=5))
        self.ledger.write(np.array(rows, np.int64), np.uint64(column))
        for row in rows:
            self.live[row].columns |= column

    @rule(rows=st.sampled_from([None, 1, 2, 3]), partial=st.booleans(), whole=st.booleans())
    def lease_rows(self, rows, partial, whole):
        grant = self.ledger.lease("score", Wish(rows=rows, partial=partial, whole=whole), self.now, 1)
        ready = [row for row, model in sorted(self.live.items()) if model.ready("score")]
        wanted = len(ready) if rows is None else min(rows, len(ready))
        short = rows is not None and len(ready) < rows and not (partial or whole)
        if not ready or short or (whole and self.blocked("score")):
            assert grant is None
        else:
            assert rows_of(grant) == ready[:wanted]
            self.take("score", grant)

    @rule(groups=st.sampled_from([None, 1, 2]), partial=st.booleans())
    def lease_groups(self, groups, partial):
        grant = self.ledger.lease("train", Wish(groups=groups, partial=partial), self.now, 1)
        members = {}
        for model in self.live.values():
            if not model.done["train"]:
                members.setdefault(model.group, []).append(model)
        whole = [models for models in members.values() if all(model.ready("train") for model in models)]
        if not whole or (groups is not None and len(whole) < groups and not partial):
            assert grant is None
            return
        count = len(whole) if groups is None else min(groups, len(whole))
        leased = {self.live[row].group for row in rows_of(grant)}
        assert len(leased) == count
        assert sorted(rows_of(grant)) == sorted(model.row for group in leased for model in members[group])
        self.take("train", grant)

    def blocked(self, task):
        return any(
            model.columns & int(READS[task]) != int(READS[task]) and not model.done[task]
            for model in self.live.values()
        )

    def take(self, task, grant):
        for row in rows_of(grant):
            assert self.live[row].leases[task] is None, "a row under two leases"
            self.live[row].leases[task] = grant.id
            self.live[row].attempts[task] += 1
        self.leases[grant.id] = (task, self.now + LEASE_SECONDS)

    def held(self, lease):
        task = self.leases[lease][0]
        return [model for model in self.live.values() if model.leases[task] == lease]

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), step=st.integers(1, 5))
    def finish(self, data, step):
        lease = data.draw(st.sampled_from(sorted(self.leases)))
        task = self.leases[lease][0]
        self.ledger.finish(lease, self.now, step)
        for model in self.held(lease):
            model.leases[task], model.done[task] = None, True
            self.steps[model.row] = step if task == "train" else self.steps.get(model.row, 0)
        self.end(lease)
        self.retire()

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), counted=st.booleans())
    def release(self, data, counted):
        lease = data.draw(st.sampled_from(sorted(self.leases)))
        self.ledger.release(lease, self.now, counted)
        self.give_back(lease, counted)

    @rule(seconds=st.sampled_from([1.0, 6.0, 20.0]))
    def time_passes(self, seconds):
        self.now += seconds
        self.ledger.expire(self.now)
        for lease in [lease for lease, (_, expires) in self.leases.items() if expires <= self.now]:
            self.give_back(lease, counted=True)

    def give_back(self, lease, counted):
        task = self.leases[lease][0]
        for model in self.held(lease):
            model.leases[task] = None
            model.attempts[task] -= not counted
            if model.attempts[task] >= ATTEMPTS:
                self.lose(model.row, f"max_attempts:{task}")
        self.end(lease)

    def end(self, lease):
        del self.leases[lease]
        self.over.append(lease)

    @rule(data=st.data())
    def drop(self, data):
        rows = data.draw(st.lists(st.integers(0, self.admitted + 2), max_size=4))
        self.ledger.drop(np.array(rows, np.int64), "chosen")
        for row in set(rows) & set(self.live):
            self.lose(row, "chosen")

    def lose(self, row, reason):
        del self.live[row]
        self.dropped[reason] = self.dropped.get(reason, 0) + 1

    @rule(step=st.integers(0, 5))
    def commit(self, step):
        self.ledger.commit("train", step)
        self.committed = max(self.committed, step)
        self.retire()

    @rule(back=st.integers(0, 3))
    def rewind(self, back):
        step = self.committed + back
        self.ledger.rewind("train", step)
        for model in self.live.values():
            if model.done["train"] and self.steps[model.row] > step:
                model.done["train"], model.attempts["train"] = False, 0

    def retire(self):
        for row, model in list(self.live.items()):
            if all(model.done.values()) and self.steps[row] <= self.committed:
                del self.live[row]
                self.retired += 1

    @invariant()
    def the_ledger_adds_up(self):
        ledger = self.ledger
        assert (ledger.admitted, ledger.done, ledger.live) == (self.admitted, self.retired, len(self.live))
        assert ledger.dropped == self.dropped
        assert ledger.admitted == ledger.done + sum(ledger.dropped.values()) + ledger.live

    @invariant()
    def counts_are_those_of_the_rows(self):
        for name, task in self.ledger.tasks.items():
            models = self.live.values()
            assert task.counts[1] == sum(model.ready(name) for model in models)
            assert task.counts[2] == sum(model.leases[name] is not None for model in models)

    @invariant()
    def rows_that_are_gone_stay_gone(self):
        rows = np.arange(-1, self.admitted + 1)
        assert rows[self.ledger.alive(rows)].tolist() == sorted(self.live)

    @invariant()
    def leases_that_are_over_are_fenced(self):
        for lease in self.over[-3:]:
            with pytest.raises(LeaseLost):
                self.ledger.finish(lease, self.now, 1)


TestLedger = LedgerMachine.TestCase
TestLedger.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)


def test_a_lease_in_force_can_be_extended_and_expires_later():
    ledger = ledger_of(2, score=TaskSpec(("a",), lease_seconds=5))
    grant = ledger.lease("score", Wish(rows=2), now=0, holder=1)
    ledger.extend(grant.id, 8, now=4)
    assert not ledger.expire(now=11)
    assert ledger.expire(now=12)
    with pytest.raises(LeaseLost):
        ledger.extend(grant.id, 8, now=12)


def test_an_acknowledgement_after_the_time_is_late_even_if_nobody_looked():
    ledger = ledger_of(2, score=TaskSpec(("a",), lease_seconds=5))
    grant = ledger.lease("score", Wish(rows=2), now=0, holder=1)
    with pytest.raises(LeaseLost):
        ledger.finish(grant.id, now=5)


def test_tasks_declared_late_see_the_living_rows():
    ledger = ledger_of(4, score=TaskSpec(("a",)))
    ledger.drop(np.array([0, 2]), "odd")
    for sampler, wish in (("fifo", Wish()), ("group", Wish(groups=2))):
        ledger.declare(sampler, TaskSpec(("a",), sampler), A)
        assert rows_of(ledger.lease(sampler, wish, 0, 1)) == [1, 3]


def test_a_sealed_table_hands_out_the_rest_and_ends():
    ledger = ledger_of(5, score=TaskSpec(("a",)))
    assert ledger.lease("score", Wish(rows=8), 0, 1) is None
    ledger.sealed = True
    grant = ledger.lease("score", Wish(rows=8), 0, 1)
    assert len(grant.rows) == 5
    assert not ledger.exhausted("score", holder=2)
    assert ledger.exhausted("score", holder=1), "its own lease cannot come back to it while it waits"
    ledger.finish(grant.id, 0)
    assert ledger.exhausted("score", holder=2)


def test_blocked_rows_hold_back_the_last_batch():
    ledger = ledger_of(3, score=TaskSpec(("a",)))
    late = ledger.admit(1, np.array([9]), np.uint64(0))
    ledger.sealed = True
    assert ledger.lease("score", Wish(rows=8), 0, 1) is None
    ledger.write(late, A)
    assert rows_of(ledger.lease("score", Wish(rows=8), 0, 1)) == [0, 1, 2, 3]


def test_a_phase_waits_for_all_of_its_rows():
    ledger = ledger_of(4, score=TaskSpec(("a",)))
    late = ledger.admit(1, np.array([9]), np.uint64(0))
    assert ledger.lease("score", Wish(whole=True), 0, 1) is None
    ledger.write(late, A)
    assert rows_of(ledger.lease("score", Wish(rows=3, whole=True), 0, 1)) == [0, 1, 2]
    assert rows_of(ledger.lease("score", Wish(rows=3, whole=True), 0, 1)) == [3, 4]


def test_cost_follows_the_rows_that_live():
    ledger = ledger_of(0, score=TaskSpec(("a",)), train=TaskSpec(("a",), "group"))
    for step in range(300):
        ledger.admit(64, np.arange(64) // 8 + step * 8, A)
        for task, wish in (("score", Wish(rows=64)), ("train", Wish(groups=8))):
            ledger.finish(ledger.lease(task, wish, 0, 1).id, 0)
    assert ledger.base == 300 * 64
    assert all(len(array._data) <= 1024 for array in (ledger._state, ledger.groups._next, ledger.groups._living))
    assert ledger.groups._slots == {}


def test_a_group_whose_first_rows_are_forgotten_is_still_found():
    ledger = ledger_of(0, train=TaskSpec(("a",), "group"))
    ledger.admit(200, np.zeros(200, np.int64), np.uint64(0))
    ledger.drop(np.arange(150), "gone")
    ledger.write(np.arange(150, 200), A)
    late = ledger.admit(2, np.array([0, 0]), A)
    assert rows_of(ledger.lease("train", Wish(groups=1), 0, 1)) == [*range(150, 200), *late.tolist()]


def test_what_a_task_cannot_be_is_refused():
    ledger = ledger_of(2, score=TaskSpec(("a",)), save=TaskSpec(("a",), durable=True))
    for spec in (TaskSpec((), "best"), TaskSpec((), max_attempts=0), TaskSpec((), lease_seconds=float("nan"))):
        with pytest.raises(SchemaError):
            ledger.declare("new", spec, A)
    with pytest.raises(SchemaError, match="declared as"):
        ledger.declare("score", TaskSpec(("b",)), A)
    with pytest.raises(SchemaError, match="not durable"):
        ledger.commit("score", 1)
    with pytest.raises(SchemaError, match="needs the step"):
        ledger.finish(ledger.lease("save", Wish(rows=1), 0, 1).id, 0)
    ledger.commit("save", 3)
    with pytest.raises(RowGone, match="committed step 3"):
        ledger.rewind("save", 2)


def test_rows_are_named_in_messages():
    assert listed(np.arange(1)) == "row 0"
    assert listed(np.arange(10)) == "rows 0, 1, 2, 3, 4, 5, 6, 7 and 2 more"
