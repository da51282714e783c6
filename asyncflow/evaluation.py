"""Evaluation: held-out prompts go through rollout and reward, and what the rewards say is counted."""

import time
from collections import Counter
from typing import Any

import numpy as np

from asyncflow.board import Board
from asyncflow.config.model import Pipeline
from asyncflow.rewards.outcome import UNUSUAL
from asyncflow.storage import Batch
from asyncflow.storage.client import Table


def evaluate(board: Board, table: Table, prompts: Batch, config: Pipeline) -> tuple[dict[str, Any], dict[str, float]]:
    """Have every prompt answered once by the published weights; return what was found, and the seconds it took.

    Accuracy is the share of scored responses whose reward is at least `eval.correct_at`.
    """
    started, rows = time.monotonic(), len(prompts)
    with board.changed:
        board.rewards.clear()
        board.outcomes.clear()
    before = _dropped(table)
    table.put(prompts)
    board.wait(
        lambda: sum(map(len, board.rewards)) + (_dropped(table) - before).total() >= rows,
        config.executor.wait_timeout,
        lambda: f"{rows} held-out responses",
    )
    rewards = np.sort(np.concatenate([*board.rewards, np.empty(0)]))
    lost = _dropped(table) - before
    values = {
        "rows": len(rewards),
        "rows_dropped": rows - len(rewards),
        **{f"reward_{outcome}": board.outcomes[outcome] + lost[f"reward_{outcome}"] for outcome in UNUSUAL},
        "accuracy": float((rewards >= config.eval.correct_at).mean()) if len(rewards) else float("nan"),
        "reward_mean": float(rewards.mean()) if len(rewards) else float("nan"),
    }
    return values, {"seconds": time.monotonic() - started}


def _dropped(table: Table) -> Counter[str]:
    """Ask the queue, since who dropped rows may have ended before it told."""
    return Counter(table.ledger().dropped)
