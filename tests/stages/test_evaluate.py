"""The stage that hands held-out responses to the flow."""

import logging

import numpy as np

from asyncflow.config.model import Data, Eval, Model, Pipeline, Reward
from asyncflow.execute.messages import Scored
from asyncflow.stage import Context
from asyncflow.stages.evaluate import Evaluate
from asyncflow.storage import Batch

FINDS = """
def last(text):
    return int(text.split()[-1]) if text else None
"""
BATCH = Batch(
    {
        "row": np.array([4, 9, 5]),
        "reward": np.array([1.0, 0.0, 0.5]),
        "reward_outcome": ["ok", "error", "ok"],
        "response_text": [" is 42 ", "", "is what"],
        "versions": [np.array([2, 2], np.int32), np.array([], np.int32), np.array([3, 2, 3], np.int32)],
    }
)


def told(tmp_path, answer=None):
    config = Pipeline(
        model=Model(path="."),
        data=Data(source="python"),
        reward=Reward(fn="exact_match"),
        eval=Eval(rows=3, answer=answer),
    )
    events, stage = [], Evaluate()
    stage.setup(Context(config, "evaluate-0", tmp_path, events.append))
    stage.process(BATCH)
    stage.process(BATCH)
    first, second = events
    assert first == second
    return first.responses


def test_every_row_is_told_with_its_text_as_the_answer(tmp_path):
    assert told(tmp_path) == (
        Scored(4, 1.0, "ok", "is 42", (2,)),
        Scored(9, 0.0, "error", "", ()),
        Scored(5, 0.5, "ok", "is what", (2, 3)),
    )


def test_a_function_finds_the_answer_and_where_it_fails_there_is_none(tmp_path, caplog):
    (tmp_path / "finds.py").write_text(FINDS)
    answers = [scored.answer for scored in told(tmp_path, f"{tmp_path / 'finds.py'}:last")]
    assert answers == ["42", None, None]
    (warning,) = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert "eval.answer failed with 'is what', which counts as no answer" in warning.getMessage()
