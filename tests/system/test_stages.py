"""A run with everything that is optional: a reference, a stage of the user's own, replicas, a dataset from Python."""

import numpy as np
import pytest

from asyncflow import Flow

pytestmark = pytest.mark.timeout(1200)  # processes start slowly where cores are shared

STAGE = """
from asyncflow.stage import stage


@stage(reads=["reward", "response_tokens"], writes={"shaped": "float64"})
def short(batch, per_token=0.01):
    return {"shaped": batch["reward"].array - per_token * batch["response_tokens"].lengths}
"""

SLOW = """
import time


def sometimes(response, word):
    if word == "cat":
        time.sleep(60)
    if word == "dog":
        return None
    return float(len(response))
"""


def test_reference_own_stage_replicas_and_a_python_dataset(pipeline, tmp_path):
    (tmp_path / "shaping.py").write_text(STAGE)
    path = pipeline(
        data={"source": "python"},
        rollout={"replicas": 2},
        train={"kl_coef": 0.1, "reward": "shaped", "algorithm": "rloo"},
        stages=[{"fn": "shaping.py:short", "options": {"per_token": 0.05}}],
        mode="separated",
        warmup=None,
    )
    flow = Flow.from_yaml(path, dataset=[{"word": word} for word in ("ant", "bee", "cat", "dog", "eel", "fox", "gnu")])
    summary = flow.start().wait(300)
    assert summary["complete"]
    steps = flow.metrics.of("step")
    assert steps[0]["kl"] == 0 or abs(steps[0]["kl"]) < 1e-6
    assert steps[-1]["kl"] != 0
    assert summary["ledger"] == {"admitted": 48, "done": 48, "dropped": {}, "live": 0}
    assert np.isfinite([step["loss"] for step in steps]).all()


def test_rows_without_a_score_leave_with_their_reason_and_others_fill_the_step(pipeline, tmp_path):
    (tmp_path / "slow.py").write_text(SLOW)
    words = ["cat", "dog", "emu", "fox", "owl", "pig"]
    path = pipeline(
        data={"source": "python", "shuffle": False},
        reward={"fn": "slow.py:sometimes", "timeout": "300ms"},
        eval={"rows": 0},
        warmup=None,
        train={"steps": 2, "group_size": 2},
    )
    flow = Flow.from_yaml(path, dataset=[{"word": word} for word in words])
    summary = flow.start().wait(300)
    ledger = summary["ledger"]
    assert ledger["done"] == 2 * 4 * 2
    assert set(ledger["dropped"]) == {"reward_timeout", "reward_unscored"}
    assert ledger["admitted"] == ledger["done"] + sum(ledger["dropped"].values())
    assert ledger["live"] == 0
    assert [step["rows"] for step in flow.metrics.of("step")] == [8, 8]
