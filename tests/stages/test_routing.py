"""Which of several replicas answers a prompt: the one that has room asks for it."""

import threading
from dataclasses import replace

import numpy as np

from asyncflow.backends.base import Capacity
from asyncflow.config.model import Data, Model, Pipeline, Reward
from asyncflow.pipeline import StageSpec, Take
from asyncflow.serve import run
from asyncflow.stage import Context, FunctionStage
from asyncflow.stages.room import Room
from asyncflow.storage import Batch, Schema, TransferQueue

CONFIG = Pipeline(model=Model(path="."), data=Data(source="python"), reward=Reward(fn="exact_match"))
SPEC = StageSpec("rollout", ("x",), {"y": "int64"}, take=Take(groups=1), lanes=2)
GROUPS = 20


class Narrow(FunctionStage):
    """A stage with room for one batch; tells of the most that it ever had at once."""

    def setup(self, context):
        self.room, self.count, self.most = Room(lambda: Capacity(0, 0, 2), 2, 30), 0, 0

    def await_room(self):
        self.room.wait()

    def process(self, batch):
        self.room.submitted(len(batch))
        self.count += 1
        self.most = max(self.most, self.count)
        threading.Event().wait(0.02)  # so that others come, if they may
        self.count -= 1
        self.room.ended(len(batch))
        return {"y": batch["x"].array}

    def close(self):
        self.room.close()


def test_lanes_of_an_engine_hold_no_prompts_that_it_has_no_room_for(tmp_path):
    stage, context = Narrow(lambda batch: None), Context(CONFIG, "rollout-0", tmp_path, lambda event: None)
    stage.setup(context)
    with TransferQueue.open("embedded://") as queue:
        table = queue.create_table("train", Schema({"x": "int64", "y": "int64"}))
        table.task("rollout", ("x",), sampler=SPEC.take.sampler)
        table.put(Batch({"x": np.arange(GROUPS), "group_id": np.arange(GROUPS)}), repeat=2)
        table.seal()
        lanes = replace(SPEC, lanes=4)
        threads = [threading.Thread(target=run, args=(lanes, stage, queue, context), daemon=True) for _ in range(4)]
        for thread in threads:
            thread.start()
        threads[0].join(60)
        while table.ledger().done < 2 * GROUPS and any(thread.is_alive() for thread in threads):
            threading.Event().wait(0.01)
        stage.close()
        for thread in threads:
            thread.join(60)
        assert table.ledger().done == 2 * GROUPS
    assert stage.most == 1


def test_a_replica_that_is_slow_holds_no_prompts_that_another_has_room_for(tmp_path):
    answered = {"slow": 0, "fast": 0}
    busy, rest = threading.Semaphore(0), threading.Event()

    def slow(batch):
        busy.release()
        assert rest.wait(30)
        answered["slow"] += 1
        return {"y": batch["x"].array}

    def fast(batch):
        answered["fast"] += 1
        if answered["fast"] == GROUPS - SPEC.lanes:
            rest.set()
        return {"y": batch["x"].array}

    def replica(queue, function, lanes):
        stage = FunctionStage(function)
        context = Context(CONFIG, function.__name__, tmp_path, lambda event: None)
        threads = [threading.Thread(target=run, args=(SPEC, stage, queue, context), daemon=True) for _ in range(lanes)]
        for thread in threads:
            thread.start()
        return threads

    with TransferQueue.open("embedded://") as queue:
        table = queue.create_table("train", Schema({"x": "int64", "y": "int64"}))
        table.task("rollout", ("x",), sampler=SPEC.take.sampler)
        table.put(Batch({"x": np.arange(GROUPS), "group_id": np.arange(GROUPS)}), repeat=2)
        table.seal()
        threads = replica(queue, slow, SPEC.lanes)
        for _ in threads:
            assert busy.acquire(timeout=30)
        threads += replica(queue, fast, 1)
        for thread in threads:
            thread.join(60)
    assert answered == {"slow": SPEC.lanes, "fast": GROUPS - SPEC.lanes}
