"""A whole queue under random use, against a model that is a dictionary and a few loops.

What a stream is handed, what is refused, the ledger, the counts of each task and the cells are compared after
every action; at the end all memory is free.
"""

import itertools
import time
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from asyncflow.errors import CellConflict, LeaseLost, QueueClosed, RowGone, SchemaError, WaitTimeout
from asyncflow.storage import Schema, TransferQueue
from asyncflow.storage.controller import Controller
from asyncflow.storage.depot import Depot
from asyncflow.storage.link import EmbeddedLink
from asyncflow.storage.placed import LOST
from asyncflow.storage.spill import Spill
from asyncflow.storage.units import Units

MAX_ROWS, LEASE_SECONDS, ATTEMPTS = 14, 10.0, 3
TASKS = {"score": "fifo", "train": "group"}


@dataclass
class View:
    """A row as one task sees it."""

    state: str = "open"
    attempts: int = 0
    settled: bool = False
    step: int = -1


@dataclass
class Row:
    group: int
    x: int
    has_y: bool = False
    views: dict = field(default_factory=lambda: {name: View() for name in TASKS})


@dataclass
class Held:
    task: str
    stream: tuple
    lease: object
    expires: float
    rows: list


class QueueMachine(RuleBasedStateMachine):
    replicas = 1

    def __init__(self):
        super().__init__()
        self.now, self.next_row = 0.0, 0
        self.queue = self.opened()
        self.over = []

    def opened(self):
        self.controller = Controller(lambda: self.now)
        return TransferQueue(EmbeddedLink(self.controller))

    @initialize()
    def begin(self):
        schema = Schema({"x": "int64", "y": "list<int32>"})
        self.table = self.queue.create_table("t", schema, max_rows=MAX_ROWS, replicas=self.replicas)
        self.table.task("score", ("x",), max_attempts=ATTEMPTS, lease_seconds=LEASE_SECONDS)
        self.table.task("train", ("x", "y"), "group", ATTEMPTS, LEASE_SECONDS, durable=True)
        self.rows, self.held, self.firsts = {}, [], {}
        self.admitted = self.retired = 0
        self.committed, self.sealed, self.dropped = -1, False, {}
        self.streams = {}

    # Rows and cells

    @rule(groups=st.integers(1, 3), repeat=st.integers(1, 3), has_y=st.booleans())
    def put(self, groups, repeat, has_y):
        count = groups * repeat
        columns = {"x": self.next_row + np.arange(groups)} | ({"y": [cell(0)] * groups} if has_y else {})
        if self.sealed or len(self.rows) + count > MAX_ROWS:
            with pytest.raises(QueueClosed if self.sealed else WaitTimeout):
                self.table.put(columns, repeat, timeout=0)
            return
        rows = self.table.put(columns, repeat, timeout=0)
        assert rows.tolist() == list(range(self.next_row, self.next_row + count))
        ids = self.table.read(rows, ["group_id"])["group_id"].array.tolist()
        for row, group, x in zip(rows.tolist(), ids, np.repeat(columns["x"], repeat).tolist(), strict=True):
            self.rows[row] = Row(group, x, has_y)
            self.firsts.setdefault(group, row)
        self.next_row, self.admitted = self.next_row + count, self.admitted + count

    @rule()
    def put_what_does_not_fit(self):
        with pytest.raises(SchemaError):
            self.table.put({"x": [1, 2], "y": [cell(0)]}, timeout=0)

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def write(self, data):
        rows = data.draw(st.lists(st.sampled_from(sorted(self.rows)), unique=True, max_size=6))
        self.table.write(rows, {"y": [cell(0)] * len(rows)})
        for row in rows:
            self.rows[row].has_y = True

    @precondition(lambda self: any(row.has_y for row in self.rows.values()))
    @rule(data=st.data())
    def write_another_value(self, data):
        row = data.draw(st.sampled_from([each for each, row in self.rows.items() if row.has_y]))
        with pytest.raises(CellConflict):
            self.table.write([row], {"y": [cell(1)]})

    @rule(data=st.data())
    def drop(self, data):
        rows = data.draw(st.lists(st.integers(0, self.next_row + 2), max_size=4))
        self.table.drop(rows, "chosen")
        for row in set(rows) & set(self.rows):
            self.lose(row, "chosen")

    # Streams and leases

    @precondition(lambda self: self.rows)
    @rule(task=st.sampled_from(sorted(TASKS)), which=st.integers(0, 1), size=st.integers(1, 3), partial=st.booleans())
    def next(self, task, which, size, partial):
        kind = "rows" if task == "score" else "groups"
        key = (task, which, size, partial)
        if key not in self.streams:
            self.streams[key] = self.table.stream(task, **{kind: size}, partial=partial)
        expected = self.expected(task, size, partial)
        if expected is None and not self.exhausted(task, key):
            with pytest.raises(WaitTimeout):
                self.streams[key].next(timeout=0)
            return
        lease = self.streams[key].next(timeout=0)
        if expected is None:
            assert lease is None
            return
        assert lease.rows.tolist() == expected
        for row in expected:
            view = self.rows[row].views[task]
            view.state, view.attempts = "leased", view.attempts + 1
        assert lease.attempt == max(self.rows[row].views[task].attempts for row in expected)
        assert lease.batch["x"].array.tolist() == [self.rows[row].x for row in expected]
        self.held.append(Held(task, key, lease, self.now + LEASE_SECONDS, expected))

    def expected(self, task, size, partial):
        open_rows = [row for row in sorted(self.rows) if self.rows[row].views[task].state != "done"]
        blocked = any(self.blocked(row, task) for row in open_rows)
        if task == "score":
            units = [[row] for row in open_rows if self.ready(row, task)]
        else:
            groups = {}
            for row in open_rows:
                groups.setdefault(self.rows[row].group, []).append(row)
            whole = [rows for rows in groups.values() if all(self.ready(row, task) for row in rows)]
            units = sorted(whole, key=lambda rows: self.firsts[self.rows[rows[0]].group])
        if not units or (len(units) < size and not (partial or (self.sealed and not blocked))):
            return None
        return [row for unit in units[:size] for row in unit]

    def blocked(self, row, task):
        return task == "train" and not self.rows[row].has_y and self.rows[row].views[task].state == "open"

    def ready(self, row, task):
        return self.rows[row].views[task].state == "open" and not self.blocked(row, task)

    def exhausted(self, task, stream):
        waits = any(self.rows[row].views[task].state == "open" for row in self.rows)
        others = [held for held in self.held if held.task == task and held.stream != stream]
        return self.sealed and not waits and not any(self.living(held) for held in others)

    def living(self, held):
        return [row for row in held.rows if row in self.rows]

    @precondition(lambda self: self.held)
    @rule(data=st.data(), step=st.integers(0, 4))
    def done(self, data, step):
        held = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        held.lease.done(step if held.task == "train" else None)
        for row in self.living(held):
            view = self.rows[row].views[held.task]
            view.state, view.step = "done", step
            view.settled = held.task == "score" or step <= self.committed
        self.over.append(held.lease)
        self.retire()

    @precondition(lambda self: self.held)
    @rule(data=st.data(), failed=st.booleans())
    def release(self, data, failed):
        held = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        held.lease.release(failed)
        self.give_back(held, failed)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def extend(self, data):
        held = data.draw(st.sampled_from(self.held))
        held.lease.extend(2 * LEASE_SECONDS)
        held.expires = self.now + 2 * LEASE_SECONDS

    @precondition(lambda self: self.streams)
    @rule(data=st.data())
    def close_stream(self, data):
        key = data.draw(st.sampled_from(sorted(self.streams)))
        self.streams.pop(key).close()
        for held in [held for held in self.held if held.stream == key]:
            self.held.remove(held)
            self.give_back(held, counted=False)

    @rule(seconds=st.sampled_from([1.0, 6.0, 20.0]))
    def time_passes(self, seconds):
        self.now += seconds
        self.controller.tick()
        for held in [held for held in self.held if held.expires <= self.now]:
            self.held.remove(held)
            self.give_back(held, counted=True)

    def give_back(self, held, counted):
        for row in self.living(held):
            view = self.rows[row].views[held.task]
            view.state, view.attempts = "open", view.attempts - (not counted)
            if view.attempts >= ATTEMPTS:
                self.lose(row, f"max_attempts:{held.task}")
        self.over.append(held.lease)

    # What is done and gone

    @rule(step=st.integers(0, 4))
    def commit(self, step):
        self.table.commit("train", step)
        self.committed = max(self.committed, step)
        for row in self.rows.values():
            view = row.views["train"]
            view.settled |= view.state == "done" and view.step <= self.committed
        self.retire()

    @rule(step=st.integers(0, 4))
    def rewind(self, step):
        if step < self.committed:
            with pytest.raises(RowGone):
                self.table.rewind("train", step)
            return
        self.table.rewind("train", step)
        for row in self.rows.values():
            view = row.views["train"]
            if view.state == "done" and not view.settled and view.step > step:
                row.views["train"] = View()

    @precondition(lambda self: any(view.state != "open" for row in self.rows.values() for view in row.views.values()))
    @rule(data=st.data())
    def reset(self, data):
        used = {name for row in self.rows.values() for name, view in row.views.items() if view.state != "open"}
        task = data.draw(st.sampled_from(sorted(used)))
        self.table.reset(task)
        self.over += [held.lease for held in self.held if held.task == task]
        self.held = [held for held in self.held if held.task != task]
        for row in self.rows.values():
            if row.views[task].state != "open":
                row.views[task] = View()
        if task == "train":
            self.committed = -1

    def retire(self):
        for row, model in list(self.rows.items()):
            if all(view.settled for view in model.views.values()):
                del self.rows[row]
                self.retired += 1

    def lose(self, row, reason):
        del self.rows[row]
        self.dropped[reason] = self.dropped.get(reason, 0) + 1

    # Life of the table

    @precondition(lambda self: self.admitted > 6)
    @rule()
    def seal(self):
        self.table.seal()
        self.sealed = True

    @precondition(lambda self: self.admitted > 6)
    @rule()
    def drop_table(self):
        old = self.table
        self.queue.drop_table("t")
        with pytest.raises(SchemaError, match="no table"):
            old.status()
        for stream in self.streams.values():
            with pytest.raises(QueueClosed, match="dropped"):
                stream.next(timeout=0)
        self.over += [held.lease for held in self.held]
        self.begin()

    @invariant()
    def the_ledger_adds_up(self):
        counts = self.table.ledger()
        assert (counts.admitted, counts.done, counts.live) == (self.admitted, self.retired, len(self.rows))
        assert counts.dropped == self.dropped

    @invariant()
    def counts_are_those_of_the_rows(self):
        status = self.table.status()
        assert (status.bytes > 0) == (len(self.rows) > 0)
        for name, task in status.tasks.items():
            states = [row.views[name].state for row in self.rows.values()]
            assert task.waiting == sum(self.ready(row, name) for row in self.rows)
            assert task.leased == states.count("leased")
            assert task.blocked == sum(self.blocked(row, name) for row in self.rows)

    @invariant()
    def leases_that_are_over_are_fenced(self):
        for lease in self.over[-3:]:
            for call in (lambda each: each.done(9), lambda each: each.extend(1), lambda each: each.release(True)):
                with pytest.raises(LeaseLost):
                    call(lease)

    def teardown(self):
        if hasattr(self, "table"):
            self.table.drop(np.arange(self.next_row), "end")
            status = self.table.status()
            assert (status.rows, status.bytes) == (0, 0)
            assert [(task.waiting, task.leased, task.blocked) for task in status.tasks.values()] == [(0, 0, 0)] * 2
        self.queue.close()


class SpilledMachine(QueueMachine):
    """The same with hardly any memory: nearly all cells are on a disk."""

    def opened(self):
        self.folder = TemporaryDirectory()
        self.controller = Controller(lambda: self.now, spill=Spill(100, Path(self.folder.name)))
        return TransferQueue(EmbeddedLink(self.controller))

    @invariant()
    def memory_falls_to_its_limit(self):
        while (kept := self.queue.status().memory[""]).memory > kept.limit:
            time.sleep(0.001)

    def teardown(self):
        super().teardown()
        assert list(Path(self.folder.name).iterdir()) == []
        self.folder.cleanup()


class PlacedMachine(QueueMachine):
    """The same on storage units, which die."""

    def opened(self):
        self.folder = TemporaryDirectory()
        self.units = Units()
        self.controller = Controller(lambda: self.now, units=self.units)
        self.host = TransferQueue(EmbeddedLink(self.controller))
        self.url = self.host.serve(f"ipc://{self.folder.name}/queue")
        self.depots = [self.joined(number) for number in range(2)]
        return TransferQueue.open(self.url)

    def joined(self, number):
        return Depot(self.url, f"ipc://{self.folder.name}/unit{number}", 30)

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def unit_dies(self, data):
        depot = self.depots.pop(data.draw(st.integers(0, 1)))
        number = next(each for each, url in self.units.urls.items() if url == depot.url)
        lost = set(self.controller._desks["t"].store.placement.on(number).tolist()) & set(self.rows)
        depot.close()
        while number in self.units.urls or self.queue._link._roster.link(number) is not None:
            time.sleep(0.001)
        for row in lost if self.replicas == 1 else ():
            self.lose(row, LOST)
        self.depots.append(self.joined(next(self.numbers)))
        self.mirrored()

    def mirrored(self):
        """Wait until all rows are on two units, if they are to be."""
        store = self.controller._desks["t"].store
        rows = np.array(sorted(self.rows), np.int64)
        while self.replicas == 2 and np.any(store.placement.copied(rows) != store.ledger.written(rows)):
            time.sleep(0.001)

    numbers = itertools.count(2)

    def teardown(self):
        super().teardown()
        for depot in self.depots:
            depot.close()
        self.host.close()
        self.folder.cleanup()


class MirroredMachine(PlacedMachine):
    """The same where each row is on two units: none is lost."""

    replicas = 2


def cell(value):
    return np.full(3, value, np.int32)


TestQueue = QueueMachine.TestCase
TestQueue.settings = settings(max_examples=10, stateful_step_count=40, deadline=None)
TestMirrored = MirroredMachine.TestCase
TestMirrored.settings = settings(max_examples=4, stateful_step_count=30, deadline=None)
TestSpilled = SpilledMachine.TestCase
TestSpilled.settings = settings(max_examples=4, stateful_step_count=30, deadline=None)
TestPlaced = PlacedMachine.TestCase
TestPlaced.settings = settings(max_examples=4, stateful_step_count=30, deadline=None)
