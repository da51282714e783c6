import logging
import time

import numpy as np
import pytest

from asyncflow.board import Board
from asyncflow.errors import WaitTimeout
from asyncflow.execute.messages import Ready
from asyncflow.pipeline import StageSpec, graph
from asyncflow.storage import Batch, Schema, TransferQueue
from asyncflow.watchdog import Watchdog

STAGES = graph(
    [
        StageSpec("source", (), {"x": "int64"}),
        StageSpec("reward", ("x",), {"reward": "float64"}, build="a:b"),
        StageSpec("train", ("x", "reward"), build="a:c"),
    ]
)


@pytest.fixture
def table():
    """Twelve rows that `train` waits for, of which `reward-0` holds eight."""
    with TransferQueue.open() as queue:
        made = queue.create_table("train", Schema({"x": "int64", "reward": "float64"}))
        made.task("reward", ("x",))
        made.task("train", ("x", "reward"), sampler="group")
        made.put(Batch({"x": np.arange(12)}))
        made.held = made.stream("reward", rows=8, consumer="reward-0").next(0)
        made.stream("train", groups=3, consumer="trainer-0").ask()
        yield made


def dog(table, seconds: float) -> Watchdog:
    return Watchdog(seconds, {"train": STAGES}, {"train": table})


def test_a_stall_names_the_stage_the_rows_the_columns_and_who_holds_them(table):
    first, second = dog(table, 1).describe().strip().split("\n")
    assert "table train: stage reward works on 8 rows held by reward-0 for" in first
    assert "stage train waits for 3 groups: 12 rows lack reward (rows 0, 1, 2, 3, 4, …; 8 rows held by rew" in second


def test_rows_that_nobody_holds_are_said_to_be_nobodys(table):
    table.held.release()
    first, second = dog(table, 1).describe().strip().split("\n")
    assert first.endswith("stage reward has 12 rows ready, and no replica asks for them")
    assert second.endswith("nobody holds them for stage reward)")


def test_a_wait_in_which_nothing_moves_warns_once_and_its_error_says_the_same(table, caplog):
    own = Board(replicas=("a",), engines=(), group_size=2, watchdog=dog(table, 0.05))
    with pytest.raises(WaitTimeout, match=r"(?s)waited 0\.5 s for step 1; nothing has moved for .*12 rows lack reward"):
        own.wait(lambda: False, 0.5, lambda: "step 1")
    (warning,) = caplog.records
    assert warning.levelno == logging.WARNING
    assert "waiting for step 1; nothing has moved for" in warning.getMessage()


@pytest.mark.parametrize("movement", ["event", "write", "done"])
def test_what_moves_is_no_stall(table, movement):
    own = dog(table, 0.2)
    board = Board(replicas=("a",), engines=(), group_size=2, watchdog=own)
    for row in table.held.rows.tolist():
        if movement == "event":
            board.take("a", Ready())
        elif movement == "write":
            table.write([row], {"reward": np.array([1.0])}, lease=table.held)
        else:
            table.put(Batch({"x": np.array([row])}))
        ends = time.monotonic() + 0.1
        while time.monotonic() < ends:
            own.look(lambda: "anything")
            time.sleep(0.01)
    assert own.stalled == ""
