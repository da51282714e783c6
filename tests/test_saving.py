"""Checkpoints from the flow's side: what is waited for, and what is committed when."""

import threading

import numpy as np
import pytest

from asyncflow.board import TRAINER, Board
from asyncflow.config.model import Data, Executor, Model, Pipeline, Reward
from asyncflow.data.draws import Draws
from asyncflow.data.order import Order
from asyncflow.errors import CheckpointError, WaitTimeout
from asyncflow.execute.messages import Copied, Finished, Save, Saved
from asyncflow.saving import Saving
from asyncflow.stages import plan
from asyncflow.storage import Batch, Schema, TransferQueue


@pytest.fixture
def own(tmp_path):
    """A saving on a real table with two rows that are done in step 1; and the commands that the trainer got."""
    config = Pipeline(
        model=Model(config={"model_type": "qwen2"}, tokenizer="characters"),
        data=Data(source="python"),
        reward=Reward(fn="exact_match"),
        executor=Executor(wait_timeout=5.0),
    )
    board, sent = Board((TRAINER,), (), 8), []
    with TransferQueue.open() as queue:
        made = Saving(config, board, plan(config).tables["train"], lambda name, what: sent.append(what), tmp_path)
        made.table = queue.create_table("train", Schema({"x": "int64"}))
        made.table.task("train", ["x"], durable=True)
        made.draws = Draws(Order(4, 0, shuffle=False))
        made.table.put(Batch({"x": np.arange(2)}))
        made.table.stream("train", rows=2).next(1.0).done(step=1)
        yield made, board, sent


def tell(board, made, *events):
    for event in events:
        board.take(TRAINER, event)
        if isinstance(event, Saved):
            made.saved(event)


def test_the_flow_waits_for_the_copy_alone_and_rows_go_when_all_is_written(own, tmp_path):
    made, board, sent = own
    folder = str(tmp_path / "checkpoints" / "step-000001")
    tell(board, made, Copied(folder))
    made.save(tmp_path / "checkpoints" / "step-000001", background=True)
    assert [type(command) for command in sent] == [Save]
    assert made.table.ledger().live == 2, "until the checkpoint is whole, it could be needed again"
    tell(board, made, Saved(folder, 1))
    assert made.table.ledger().live == 0


def test_the_next_one_waits_until_the_one_before_is_written(own, tmp_path):
    made, board, sent = own
    first, second = (str(tmp_path / name) for name in ("first", "second"))
    tell(board, made, Copied(first))
    made.save(tmp_path / "first", background=True)
    thread = threading.Thread(target=made.save, args=(tmp_path / "second",))
    thread.start()
    thread.join(0.2)
    assert [command.folder for command in sent] == [first]
    tell(board, made, Saved(first, 1), Copied(second), Saved(second, 2))
    thread.join(5.0)
    assert not thread.is_alive()
    assert [command.folder for command in sent] == [first, second]


def test_a_trainer_that_ends_before_or_never_answers_is_named(own, tmp_path):
    made, board, _ = own
    made.config = made.config.model_copy(update={"executor": Executor(wait_timeout=0.1)})
    with pytest.raises(WaitTimeout, match=r"the trainer to have saved .*checkpoint"):
        made.save(tmp_path / "checkpoint")
    tell(board, made, Finished())
    with pytest.raises(CheckpointError, match="the trainer ended before it had saved"):
        made.save(tmp_path / "checkpoint", final=True)
