"""The reward stage: what becomes of rows by the outcome of their scoring, with a function that really hangs."""

import pytest

from asyncflow.config.model import Data, Model, Pipeline, Reward
from asyncflow.config.training import Train
from asyncflow.execute.messages import Trouble
from asyncflow.stage import Context, Drop, Part
from asyncflow.stages import reward
from asyncflow.storage import Batch
from tests.backends.tiny import CONFIG

FUNCTION = """
import time
from pathlib import Path


def fickle(response):
    with Path(__file__).with_name("calls").open("a") as calls:
        calls.write(response + chr(10))
    if response == "late":
        return 1.0 if Path(__file__).with_name("calls").read_text().count("late") == 2 else int(response)
    return {"hang": lambda: time.sleep(600), "fail": lambda: int(response), "none": lambda: None}.get(
        response, lambda: 0.5
    )()
"""


@pytest.fixture
def serve(tmp_path):
    """Let a stage with some choices answer responses; return its parts and drops as plain values, and what it told."""
    (tmp_path / "fickle.py").write_text(FUNCTION)

    def answers(responses, **choices):
        config = Pipeline(
            model=Model(config=CONFIG, tokenizer="characters"),
            data=Data(source="python"),
            reward=Reward(fn=f"{tmp_path / 'fickle.py'}:fickle", timeout=0.5, **choices),
            train=Train(rows_per_step=64),
        )
        told = []
        stage = reward.Reward()
        stage.setup(Context(config, "reward-0", tmp_path, told.append))
        empty = [""] * len(responses)
        texts = {"response_text": responses, "item": ["{}"] * len(responses)}
        batch = Batch({**dict.fromkeys(("prompt_text", "answer_text", "source"), empty), **texts})
        found = {}
        try:
            for piece in stage.process(batch):
                found |= _rows(piece)
        finally:
            stage.close()
        return [found[row] for row in range(len(responses))], told

    return answers


def _rows(piece):
    if isinstance(piece, Drop):
        return dict.fromkeys(piece.positions.tolist(), piece.reason)
    assert isinstance(piece, Part)
    columns = piece.columns["reward"].array.tolist(), piece.columns["reward_outcome"].strings()
    return dict(zip(piece.positions.tolist(), zip(*columns, strict=True), strict=True))


def test_rows_without_a_score_leave_each_with_its_reason_and_the_others_stay(serve):
    rows, told = serve(["good", "hang", "fail", "good", "none"])
    assert rows == [(0.5, "ok"), "reward_timeout", "reward_error", (0.5, "ok"), "reward_unscored"]
    assert told == [Trouble("unscored: the reward function returned None", 0, 1)]


def test_a_zero_that_was_asked_for_can_be_told_from_a_score(serve):
    choices = {"on_timeout": "zero", "on_error": "zero", "on_unscored": "zero"}
    rows, _ = serve(["good", "hang", "fail", "none"], **choices)
    assert rows == [(0.5, "ok"), (0.0, "timeout"), (0.0, "error"), (0.0, "unscored")]


def test_a_row_is_scored_again_and_leaves_in_the_end(serve, tmp_path):
    choices = {"on_error": "retry", "on_timeout": "retry", "retries": 2}
    rows, told = serve(["late", "fail", "hang", "none"], **choices)
    assert rows == [(1.0, "ok"), "reward_error", "reward_timeout", "reward_unscored"]
    calls = (tmp_path / "calls").read_text().split()
    assert {name: calls.count(name) for name in calls} == {"late": 2, "fail": 3, "hang": 3, "none": 1}
    ((trouble),) = told
    assert (trouble.retried, trouble.replaced) == (5, 3)


def test_nothing_is_told_where_all_is_well(serve):
    assert serve(["good", "good"]) == ([(0.5, "ok")] * 2, [])
