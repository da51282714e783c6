"""Evaluations over a real queue and real stage loops; engines that answer when they are told to."""

import queue as queues
import threading
import traceback
from collections.abc import Iterator
from contextlib import suppress
from functools import partial

import numpy as np
import pytest

from asyncflow.board import Board, Stopped
from asyncflow.config.model import Data, Eval, Executor, Model, Pipeline, Reward, Rollout
from asyncflow.delivery import Delivery
from asyncflow.errors import WaitTimeout, WeightsError
from asyncflow.evaluation import Evaluations
from asyncflow.execute.messages import Applied, Apply, Evaluated, Failed, Published
from asyncflow.observe.metrics import Metrics
from asyncflow.observe.trace import Trace
from asyncflow.serve import run
from asyncflow.stage import Context, Drop, FunctionStage, Part
from asyncflow.stages import plan
from asyncflow.stages.evaluate import Evaluate
from asyncflow.storage import Batch, Schema, TransferQueue

WORDS = ("yes", "no", "odd", "drop")
"""A prompt is a token, which names its word."""
SIX = ("yes", "no", "odd", "yes", "no", "odd")


class World:
    """A flow without its trainer: one engine, the stages of held-out rows, and what they meet."""

    def __init__(self, queue: TransferQueue, tmp_path, wait: float = 60.0, **options: object) -> None:
        self.config = Pipeline(
            model=Model(path="."),
            data=Data(source="python"),
            reward=Reward(fn="exact_match"),
            rollout=Rollout(max_inflight=8),
            executor=Executor(wait_timeout=wait),
            mode="async",
            eval=Eval(**{"rows": 6, "samples": 2, "temperature": 1.0, "every": 1, **options}),
        )
        self.board = Board(("a",), ("a",), 8)
        self.metrics = Metrics(tmp_path / "metrics.jsonl")
        self.commands: queues.Queue[Apply] = queues.Queue()
        self.told: list[int] = []
        self.version, self.stamped = -1, None
        self.delivery = Delivery(("a",), "trainer", self.send)
        self.go = threading.Event()
        self.go.set()
        self.under_way = self.most = 0
        self.counting = threading.Lock()
        self.twice = False
        threading.Thread(target=self.engine, daemon=True).start()
        self.own = Evaluations(self.config, self.board, self.delivery, self.metrics, Trace())
        self.own.table, self.own.prompts = self.serve(queue, tmp_path), prompts(SIX)
        self.publish(0)

    def send(self, name: str, command: object) -> None:
        if isinstance(command, Apply):
            self.commands.put(command)

    def engine(self) -> None:
        """Apply what it is told of, and say so."""
        while True:
            self.version = self.commands.get().version
            self.told.append(self.version)
            self.board.take("a", Applied(self.version))
            self.delivery.answered("a", self.version, applied=True)

    def publish(self, version: int) -> None:
        self.board.take("trainer", Published(version, b""))
        self.delivery.published(version, b"")
        self.delivery.use(version)

    def serve(self, queue: TransferQueue, tmp_path):
        graph = plan(self.config).tables["eval"]
        table = queue.create_table("eval", Schema(dict(graph.columns)))
        stages = {"rollout": FunctionStage(self.answer), "reward": FunctionStage(score), "evaluate": Evaluate()}
        for spec in graph.stages:
            if not spec.build:
                continue
            table.task(spec.name, spec.reads, **spec.sampling)
            context = Context(self.config, f"{spec.name}-0", tmp_path, partial(self.report, spec.name))
            stages[spec.name].setup(context)
            for _ in range(spec.lanes):
                loop = partial(self.loop, spec, stages[spec.name], queue, context)
                threading.Thread(target=loop, daemon=True).start()
        return table

    def loop(self, *args: object) -> None:
        try:
            with suppress(WaitTimeout):
                run(*args)
        except Exception:  # noqa: BLE001  as a replica does
            self.board.take("a", Failed(traceback.format_exc()))

    def report(self, name: str, event: object) -> None:
        self.board.take(name, event)
        if isinstance(event, Evaluated) and self.twice:
            self.board.take(name, event)

    def answer(self, batch: Batch) -> Iterator[Part | Drop]:
        """Answer with the word and the number of the sample; what is about `drop` leaves, after it was under way."""
        with self.counting:
            self.under_way += len(batch)
            self.most = max(self.most, self.under_way)
        self.go.wait(60)
        with self.counting:
            self.under_way -= len(batch)
        rows = zip(batch["prompt_tokens"], batch["rollout_id"].array.tolist(), strict=True)
        texts = [f"{WORDS[tokens[0]]} {number}" for tokens, number in rows]
        version = self.version if self.stamped is None else self.stamped
        gone = np.array([text.startswith("drop") for text in texts])
        if gone.any():
            yield Drop(np.flatnonzero(gone), "aborted")
        kept, count = np.flatnonzero(~gone), int((~gone).sum())
        if not count:
            return
        columns = {
            "response_text": [texts[row] for row in kept],
            "response_tokens": [np.array([1, 2])] * count,
            "response_mask": [np.array([1, 1], np.uint8)] * count,
            "rollout_logprobs": [np.zeros(2, np.float32)] * count,
            "versions": [np.full(2, version, np.int32)] * count,
            "finish": ["stop"] * count,
        }
        yield Part(kept, Batch(columns))


def prompts(words: tuple[str, ...]) -> Batch:
    count = len(words)
    return Batch(
        {
            "prompt_text": list(words),
            "prompt_tokens": [np.array([WORDS.index(word)]) for word in words],
            "answer_text": [""] * count,
            "item": ["{}"] * count,
            "temperature": np.ones(count, np.float32),
            "seed": np.arange(count),
            "requeued": np.zeros(count, np.int32),
        }
    )


def score(batch: Batch) -> dict[str, object]:
    """`yes` is correct, `no` is not, and `odd` is in its second sample alone."""
    texts = batch["response_text"].strings()
    rewards = [float(text.startswith("yes") or text == "odd 1") for text in texts]
    return {"reward": rewards, "reward_outcome": ["error" if text.startswith("no") else "ok" for text in texts]}


@pytest.fixture
def world(tmp_path):
    with TransferQueue.open() as queue:
        made: list[World] = []

        def make(**options: object) -> World:
            made.append(World(queue, tmp_path, **options))
            return made[0]

        yield make
        made[0].go.set()
        made[0].own.close()
        made[0].metrics.close()


def record(own: World) -> dict[str, object]:
    (found,) = own.metrics.of("eval")
    return {key: value for key, value in found.items() if key not in ("time", "kind")}


def test_between_steps_every_sample_of_every_prompt_counts_once(world):
    own = world()
    own.twice = True
    own.own.between("before")
    assert record(own) == {
        "moment": "before",
        "version": 0,
        "prompts": 6,
        "rows": 12,
        "rows_dropped": 0,
        "reward_timeout": 0,
        "reward_error": 4,
        "reward_unscored": 0,
        "accuracy": 0.5,
        "reward_mean": 0.5,
        "pass@2": pytest.approx(2 / 3),
        "mean@2": 0.5,
        "maj@2": pytest.approx(1 / 3),
    }
    assert own.board.pinned is None
    assert own.own.table.ledger().admitted == 12


def test_beside_training_only_as_many_responses_are_generated_at_once_as_there_are_permits(world):
    own = world(max_inflight=5)
    own.own.begin("step_1", 1)
    own.own.drain()
    assert (record(own)["rows"], record(own)["step"]) == (12, 1)
    assert 0 < own.most <= 4  # the samples of a prompt begin together


def test_while_it_generates_engines_keep_their_version_and_then_get_the_newest(world):
    own = world()
    own.go.clear()
    own.own.begin("step_1", 1)
    assert own.board.pinned == 0
    for version in (1, 2):
        own.publish(version)
    own.go.set()
    own.own.free()
    assert own.board.pinned is None
    own.board.wait_applied(2, 60)
    own.own.drain()
    assert record(own)["version"] == 0
    assert own.told == [0, 2]


def test_the_next_one_waits_for_the_first(world):
    own = world()
    own.go.clear()
    own.own.begin("step_1", 1)
    own.publish(1)
    threading.Timer(0.05, own.go.set).start()
    own.own.begin("step_2", 2)
    own.own.drain()
    assert [(found["moment"], found["version"], found["rows"]) for found in own.metrics.of("eval")] == [
        ("step_1", 0, 12),
        ("step_2", 1, 12),
    ]


def test_rows_that_leave_are_told_and_keep_nobody_waiting(world):
    own = world(max_inflight=2)
    own.own.prompts = prompts(("yes", "drop", "drop", "no"))
    own.own.begin("step_1", 1)
    own.own.drain()
    found = record(own)
    assert (found["prompts"], found["rows"], found["rows_dropped"]) == (4, 4, 4)
    assert (found["accuracy"], found["pass@2"]) == (0.5, 0.5)


def test_an_error_beside_training_ends_whatever_the_run_waits_for(world):
    own = world(wait=0.3)
    own.go.clear()
    own.own.begin("step_1", 1)
    with pytest.raises(WaitTimeout, match=r"waited 0\.3 s for \d+ held-out responses"):
        own.board.wait(lambda: False, 60, lambda: "a step")
    with pytest.raises(WaitTimeout, match="held-out responses"):
        own.own.drain()


def test_an_answer_by_another_version_is_an_error_and_no_number(world):
    own = world()
    own.stamped = 7
    with pytest.raises(WeightsError, match=r"answered by version 0, and \[7\] did, too"):
        own.own.between("before")
    assert own.metrics.of("eval") == []


@pytest.mark.parametrize("end", ["stop", "close"])
def test_one_that_is_under_way_is_given_up_when_the_run_ends(world, end):
    own = world()
    own.go.clear()
    own.own.begin("step_1", 1)
    if end == "stop":
        own.board.stop()
        with pytest.raises(Stopped):
            own.own.drain()
    own.own.close()
    assert not own.own._thread.is_alive()
    assert own.metrics.of("eval") == []
    assert own.board.failure is None
