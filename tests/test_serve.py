"""The stage loop over a real embedded queue: rows in, columns out, by row key."""

import threading
import time
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from asyncflow.config.model import Data, Model, Pipeline, Reward
from asyncflow.errors import CellConflict, PipelineError, WaitTimeout
from asyncflow.execute.messages import Dropped, Worked
from asyncflow.pipeline import StageSpec, Take
from asyncflow.serve import run
from asyncflow.stage import Context, Done, Drop, FunctionStage, Part, Rows, stage
from asyncflow.storage import Batch, Schema, TransferQueue

CONFIG = Pipeline(model=Model(path="."), data=Data(source="python"), reward=Reward(fn="exact_match"))


@pytest.fixture
def queue() -> Iterator[TransferQueue]:
    with TransferQueue.open("embedded://") as opened:
        yield opened


def serve(queue: TransferQueue, spec: StageSpec, made: object, tmp_path, rows: int = 6) -> tuple[Batch, list[object]]:
    """Run a stage over some rows until the data ends; return what the table then holds, and the events."""
    table = queue.create_table("train", Schema({"x": "int64", "y": "float64"}))
    table.task(spec.name, spec.reads, durable=spec.durable)
    table.task("keep", ("x",))
    numbers = table.put(Batch({"x": np.arange(rows)}))
    table.seal()
    events: list[object] = []
    context = Context(CONFIG, "double-0", tmp_path, events.append, options=spec.options)
    made.setup(context)
    run(spec, made, queue, context)
    gone = {event.groups for event in events if isinstance(event, Dropped)}
    left = [row for row in numbers.tolist() if (row,) not in gone]
    return (table.read(left, ("y",)) if spec.writes else Batch({}, rows=0)), events


def spec(**more: object) -> StageSpec:
    return StageSpec("double", ("x",), {"y": "float64"}, **{"take": Take(rows=4, partial=True), **more})


@stage(reads=["x"], writes={"y": "float64"})
def double(batch: Batch, factor: float = 2.0) -> dict[str, object]:
    return {"y": batch["x"].array * factor}


def test_a_plain_function_is_a_stage(queue, tmp_path):
    written, events = serve(queue, spec(), FunctionStage(double), tmp_path)
    assert written["y"].array.tolist() == [0, 2, 4, 6, 8, 10]
    assert sum(event.rows for event in events if isinstance(event, Worked)) == 6


def test_a_batch_says_when_it_began_and_how_its_time_was_spent(queue, tmp_path):
    before = time.monotonic()
    _, events = serve(queue, spec(take=Take(rows=2)), FunctionStage(double), tmp_path)
    batches = [event for event in events if isinstance(event, Worked)]
    assert [event.rows for event in batches] == [2, 2, 2]
    at = before
    for event in batches:
        leased = event.started + event.idle
        ended = leased + event.busy + event.blocked
        assert at <= event.started <= leased <= ended <= time.monotonic()
        told = [moment for wait in event.waits for moment in wait]
        assert told == sorted(told)
        assert event.blocked == pytest.approx(sum(end - began for began, end in event.waits))
        assert all(leased <= moment <= ended + 1e-6 for moment in told)
        at = ended - 1e-6


def test_options_reach_the_function(queue, tmp_path):
    written, _ = serve(queue, spec(options={"factor": 3.0}), FunctionStage(double), tmp_path)
    assert written["y"].array.tolist() == [0, 3, 6, 9, 12, 15]


def test_parts_in_any_order_are_joined_by_row(queue, tmp_path):
    def backwards(batch: Batch) -> Iterator[Part]:
        for position in reversed(range(len(batch))):
            yield Part(np.array([position]), {"y": batch["x"].array[[position]] * 10.0})

    written, _ = serve(queue, spec(), FunctionStage(backwards), tmp_path)
    assert written["y"].array.tolist() == [0, 10, 20, 30, 40, 50]


def test_dropped_rows_leave_with_their_reason(queue, tmp_path):
    def odd_only(batch: Batch) -> Iterator[Part | Drop]:
        odd = batch["x"].array % 2 == 1
        yield Drop(np.flatnonzero(~odd), "even")
        yield Part(np.flatnonzero(odd), Batch({"y": batch["x"].array[odd] * 1.0}))

    table_rows, events = serve(queue, spec(take=Take(rows=1)), FunctionStage(odd_only_one(odd_only)), tmp_path)
    assert table_rows["y"].array.tolist() == [1, 3, 5]
    assert queue.table("train").ledger().dropped == {"even": 3}
    assert sum(isinstance(event, Dropped) for event in events) == 3


def test_a_stage_that_training_does_not_wait_for_drops_nothing(queue, tmp_path):
    def all_of_them(batch: Batch) -> Iterator[Drop]:
        yield Drop(np.arange(len(batch)), "unwanted")

    with pytest.raises(PipelineError, match=r"stage double drops row 0 \(unwanted\), which may be trained already"):
        serve(queue, spec(drops=False), FunctionStage(all_of_them), tmp_path)
    assert queue.table("train").ledger().dropped == {}


def odd_only_one(function):
    """Skip parts without rows, as a stage that looks at one row at a time would."""

    def call(batch: Batch):
        return (part for part in function(batch) if len(part.positions))

    return call


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (lambda batch: {"z": batch["x"].array}, r"declares that it writes \['y'\] and returned \['z'\]"),
        (lambda batch: {"y": np.zeros(1)}, "returned 1 values for 4 rows"),
        (lambda batch: 5, "returned int: expected a Batch or a mapping"),
        (lambda batch: np.zeros(4), "returned ndarray: expected"),
        (lambda batch: [{"y": np.zeros(4)}], "yielded dict: expected"),
        (lambda batch: [Part(np.array([3, 4]), {"y": np.zeros(2)})], "answered positions 3 to 4 of a batch of 4 rows"),
        (lambda batch: [Part(np.array([0, -4]), {"y": np.zeros(2)})], "answered positions -4 to 0 of a batch of 4"),
        (
            lambda batch: [Drop(np.array([True] * 4), "all")],
            r"gave positions of bool, \(4,\): expected a list of int64",
        ),
        (lambda batch: [], "left 4 of 4 rows without an answer, the first is row 0"),
        (lambda batch: [Part(np.array([0, 0]), Batch({"y": np.zeros(2)}))], "answered row 0 or one beside it twice"),
    ],
)
def test_a_wrong_answer_is_an_error_that_names_the_stage(queue, tmp_path, answer, message):
    with pytest.raises(PipelineError, match=f"stage double .*{message}"):
        serve(queue, spec(), FunctionStage(answer), tmp_path)


def test_a_durable_stage_acknowledges_with_its_step(queue, tmp_path):
    def train(batch: Batch) -> Iterator[Done]:
        yield Done(1)

    sink = StageSpec("double", ("x",), durable=True, take=Take(rows=6))
    _, events = serve(queue, sink, FunctionStage(train), tmp_path)
    assert [event.version for event in events if isinstance(event, Worked)] == [1]
    status = queue.table("train").status()
    assert status.tasks["double"].done == 6
    assert status.rows == 6


def test_a_durable_stage_that_gives_up_half_way_keeps_its_rows_undone(queue, tmp_path):
    table = queue.create_table("train", Schema({"x": "int64"}))
    table.task("train", ("x",), durable=True)
    table.put(Batch({"x": np.arange(3)}))
    stopping = threading.Event()
    context = Context(CONFIG, "trainer-0", tmp_path, lambda event: None, stopping=stopping)

    def interrupted(batch: Batch) -> Iterator[Done]:
        stopping.set()
        return iter(())

    run(StageSpec("train", ("x",), durable=True, take=Take(rows=3)), FunctionStage(interrupted), queue, context)
    status = table.status().tasks["train"]
    assert (status.waiting, status.leased, status.done) == (3, 0, 0)


def test_the_end_of_the_data_ends_the_loop(queue, tmp_path):
    written, _ = serve(queue, spec(), FunctionStage(double), tmp_path, rows=1)
    assert written["y"].array.tolist() == [0]


def impatient(tmp_path) -> Context:
    config = CONFIG.model_copy(update={"executor": CONFIG.executor.model_copy(update={"wait_timeout": 0.05})})
    return Context(config, "double-0", tmp_path, lambda event: None)


def test_a_stage_without_rows_to_come_may_wait_longer_than_the_bound(queue, tmp_path):
    table = queue.create_table("train", Schema({"x": "int64", "y": "float64"}))
    table.task("double", ("x",))

    def late() -> None:
        table.put(Batch({"x": np.arange(3)}))
        table.seal()

    threading.Timer(0.3, late).start()
    run(spec(), FunctionStage(double), queue, impatient(tmp_path))
    assert table.status().tasks["double"].done == 3


def test_a_stage_whose_rows_never_become_ready_ends_with_what_is_missing(queue, tmp_path):
    table = queue.create_table("train", Schema({"x": "int64", "y": "float64"}))
    table.task("double", ("y",))
    table.put(Batch({"x": np.arange(3)}))
    with pytest.raises(WaitTimeout, match=r"double.*y"):
        run(StageSpec("double", ("y",), take=Take(rows=3)), FunctionStage(double), queue, impatient(tmp_path))


class Pairs:
    """Gathers two batches, and then writes all of their rows."""

    def setup(self, context: Context) -> None:
        self.held: list[int] = []

    def process(self, batch: Batch) -> Iterator[Rows | Drop | Done]:
        if 5 in batch["x"].array:
            yield Drop(np.flatnonzero(batch["x"].array == 5), "five")
        self.held += [
            row for row, x in zip(batch["row"].array.tolist(), batch["x"].array.tolist(), strict=True) if x != 5
        ]
        if len(self.held) >= 4:
            rows, self.held = self.held, []
            yield Rows(np.array(rows), Batch({"y": np.array(rows, float)}))
            yield Done(1)

    def close(self) -> None:
        return None


def test_a_stage_that_gathers_is_done_with_all_of_its_batches_at_once_or_with_none(queue, tmp_path):
    table = queue.create_table("train", Schema({"x": "int64", "y": "float64"}))
    table.task("double", ("x",), durable=True)
    rows = table.put(Batch({"x": np.arange(8)}))
    table.seal()
    events, stage = [], Pairs()
    context = Context(CONFIG, "double-0", tmp_path, events.append)
    stage.setup(context)
    run(spec(durable=True, gathers=True, take=Take(rows=2)), stage, queue, context)
    assert table.read(rows[:4], ["y"])["y"].array.tolist() == [0, 1, 2, 3]
    # The last two batches have three rows left, too few: they were given back when the data ended.
    status = table.status().tasks["double"]
    assert (status.done, status.waiting, status.leased) == (4, 3, 0)
    assert [event.reason for event in events if isinstance(event, Dropped)] == ["five"]


def test_what_was_gathered_stays_under_lease_however_long_the_rest_takes(queue, tmp_path):
    table = queue.create_table("train", Schema({"x": "int64", "y": "float64"}))
    table.task("double", ("x",), durable=True, lease_seconds=4)
    table.put(Batch({"x": np.arange(2)}))

    def rest() -> None:
        table.put(Batch({"x": np.arange(2)}))
        table.seal()

    threading.Timer(6.0, rest).start()
    config = CONFIG.model_copy(update={"executor": CONFIG.executor.model_copy(update={"wait_timeout": 4})})
    stage, context = Pairs(), Context(config, "double-0", tmp_path, lambda event: None)
    stage.setup(context)
    run(spec(durable=True, gathers=True, take=Take(rows=2)), stage, queue, context)
    assert table.status().tasks["double"].done == 4


def test_rows_that_another_stage_drops_while_they_are_gathered_are_left_out(queue, tmp_path):
    table = queue.create_table("train", Schema({"x": "int64", "y": "float64"}))
    table.task("double", ("x",), durable=True)
    rows = table.put(Batch({"x": np.arange(4)}))
    table.seal()

    class Dropping(Pairs):
        def process(self, batch: Batch) -> Iterator[Rows | Drop | Done]:
            if 2 in batch["x"].array:
                table.drop(rows[:1], "beside")
            yield from super().process(batch)

    stage, context = Dropping(), Context(CONFIG, "double-0", tmp_path, lambda event: None)
    stage.setup(context)
    run(spec(durable=True, gathers=True, take=Take(rows=2)), stage, queue, context)
    assert table.read(rows[1:], ["y"])["y"].array.tolist() == [1, 2, 3]


def interrupted(table, rows: int) -> list[int]:
    """Put rows of which a replica that ended early has written those of even number, and holds none any more."""
    table.task("double", ("x",))
    table.task("keep", ("x",))
    numbers = table.put(Batch({"x": np.arange(rows)}))
    with table.stream("double", rows=rows) as stream:
        lease = stream.next(0)
        table.write(numbers[::2], {"y": np.full(len(numbers[::2]), -1.0)}, lease=lease)
    table.seal()
    return numbers.tolist()


def test_rows_that_come_again_keep_what_they_were_given_first(queue, tmp_path):
    table = queue.create_table("train", Schema({"x": "int64", "y": "float64"}))
    rows = interrupted(table, 6)
    context = Context(CONFIG, "double-0", tmp_path, lambda event: None)
    run(spec(), FunctionStage(double), queue, context)
    assert table.read(rows, ["y"])["y"].array.tolist() == [-1, 2, -1, 6, -1, 10]
    assert table.status().tasks["double"].done == 6


def test_rows_that_come_again_are_not_dropped_once_they_were_written(queue, tmp_path):
    table = queue.create_table("train", Schema({"x": "int64", "y": "float64"}))
    rows = interrupted(table, 4)
    events = []

    def drop(batch: Batch) -> Iterator[Drop]:
        yield Drop(np.arange(len(batch)), "bad")

    run(spec(), FunctionStage(drop), queue, Context(CONFIG, "double-0", tmp_path, events.append))
    assert table.ledger().dropped == {"bad": 2}
    assert table.find().rows.tolist() == rows[::2]
    assert [event.rows for event in events if isinstance(event, Dropped)] == [tuple(rows[1::2])]


def test_rows_that_another_stage_drops_while_they_are_worked_on_are_left_out(queue, tmp_path):
    table = queue.create_table("train", Schema({"x": "int64", "y": "float64"}))
    table.task("double", ("x",))
    table.task("keep", ("x",))
    rows = table.put(Batch({"x": np.arange(4)}))
    table.seal()

    def slow(batch: Batch) -> dict[str, object]:
        table.drop(rows[:1], "beside")
        return {"y": batch["x"].array * 1.0}

    run(spec(), FunctionStage(slow), queue, Context(CONFIG, "double-0", tmp_path, lambda event: None))
    assert table.read(rows[1:], ["y"])["y"].array.tolist() == [1, 2, 3]


def test_a_cell_that_another_writer_has_written_in_part_is_an_error(queue, tmp_path):
    table = queue.create_table("train", Schema({"x": "int64", "y": "float64", "z": "int64"}))
    table.task("double", ("x",))
    rows = table.put(Batch({"x": np.arange(2)}))
    table.write(rows, {"y": np.array([-1.0, -1.0])})
    table.seal()
    both = replace(spec(take=Take(rows=2)), writes={"y": "float64", "z": "int64"})
    context = Context(CONFIG, "double-0", tmp_path, lambda event: None)
    with pytest.raises(CellConflict):
        run(both, FunctionStage(lambda batch: {"y": batch["x"].array * 1.0, "z": batch["x"].array}), queue, context)


def test_rows_that_fail_every_time_are_dropped_at_the_third_and_others_are_not(queue, tmp_path):
    table = queue.create_table("train", Schema({"x": "int64", "y": "float64"}))
    table.task("double", ("x",))
    table.task("keep", ("x",))
    table.put(Batch({"x": np.arange(3)}))
    table.seal()

    def poisoned(batch: Batch) -> dict[str, object]:
        if 1 in batch["x"].array:
            raise ValueError("one")
        return {"y": batch["x"].array * 1.0}

    context = Context(CONFIG, "double-0", tmp_path, lambda event: None)
    for _ in range(3):
        with pytest.raises(ValueError, match="one"):
            run(spec(take=Take(rows=1)), FunctionStage(poisoned), queue, context)
    run(spec(take=Take(rows=1)), FunctionStage(poisoned), queue, context)
    assert table.ledger().dropped == {"max_attempts:double": 1}
    assert table.status().tasks["double"].done == 2


def test_a_loop_ends_with_the_lease_that_it_was_to_end_with_and_gives_it_back(queue, tmp_path):
    table = queue.create_table("train", Schema({"x": "int64", "y": "float64"}))
    table.task("double", ("x",))
    table.put(Batch({"x": np.arange(3)}))
    context = Context(CONFIG, "double-0", tmp_path, lambda event: None)
    run(spec(take=Take(rows=1)), FunctionStage(double), queue, context, until=lambda lease: 1 in lease.rows)
    status = table.status().tasks["double"]
    assert (status.done, status.waiting, status.leased) == (1, 2, 0)
