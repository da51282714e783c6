"""Every recipe trains: whole runs, and what is particular of each."""

import json

import pyarrow.parquet as pq
import pytest

from asyncflow import Flow
from asyncflow.errors import DataError
from tests.system.test_run import timeless

pytestmark = pytest.mark.timeout(1200)  # processes start slowly where cores are shared

MODES = ("colocated", "streaming")
SHORT = {"warmup": None, "eval": {"rows": 0}}


def steps(folder):
    return [record for record in timeless(folder) if record["kind"] == "step"]


@pytest.mark.parametrize(
    ("recipe", "more"),
    [
        ("gspo", {}),
        ("cispo", {}),
        ("maxrl", {"loss": "gspo-token"}),
        ("reinforce++", {"kl_coef": 0.1}),
        ("reinforce++-baseline", {"filters": {"policy": ["finished"]}}),
        ("grpo", {"kl_coef": 0.1, "kl_in": "reward", "off_policy": "reject", "off_policy_high": 1.5}),
    ],
)
def test_a_recipe_trains(pipeline, recipe, more):
    path = pipeline(**SHORT, train={"algorithm": recipe, "steps": 2, **more})
    summary = Flow.from_yaml(path).start().wait(300)
    assert [step["step"] for step in steps(summary.folder)] == [1, 2]
    assert all(step["grad_norm"] > 0 for step in steps(summary.folder))
    assert all(("reference_kl" in step) == ("kl_coef" in more) for step in steps(summary.folder))
    assert all(("off_policy_rejected_share" in step) == ("off_policy" in more) for step in steps(summary.folder))


@pytest.fixture
def dull(tmp_path):
    """A reward that is the same for all responses to a third of the prompts."""
    (tmp_path / "dull.py").write_text(
        "def dull(response, word):\n    return 1.0 if word[0] == 'd' else float(len(set(response)))\n"
    )


@pytest.mark.usefixtures("dull")
def test_groups_without_a_signal_are_replaced_until_the_step_is_full(pipeline):
    path = pipeline(
        **SHORT, train={"algorithm": "dapo", "steps": 2}, reward={"fn": "dull.py:dull"}, output={"samples_every": 1}
    )
    summary = Flow.from_yaml(path).start().wait(300)
    ledger = json.loads((summary.folder / "summary.json").read_text())["ledger"]
    assert ledger["dropped"]["no_signal"] > 0
    assert ledger["admitted"] == ledger["done"] + ledger["dropped"]["no_signal"]
    assert all(step["rows"] == 16 and step["advantage_zero_share"] == 0 for step in steps(summary.folder))


@pytest.mark.usefixtures("dull")
def test_which_groups_replace_others_does_not_depend_on_the_mode(pipeline):
    train = {"algorithm": "dapo", "steps": 3}
    path = pipeline(**SHORT, deterministic=True, train=train, reward={"fn": "dull.py:dull"})
    one, other = (timeless(Flow.from_yaml(path, f"mode={mode}").start().wait(300).folder) for mode in MODES)
    assert one == other


@pytest.mark.usefixtures("dull")
def test_with_a_bound_what_is_more_than_a_step_needs_is_trained_in_the_next(pipeline):
    path = pipeline(**SHORT, mode="async", train={"algorithm": "dapo", "steps": 5}, reward={"fn": "dull.py:dull"})
    summary = Flow.from_yaml(path, "run_ahead=1").start().wait(300)
    ledger = json.loads((summary.folder / "summary.json").read_text())["ledger"]
    assert ledger["done"] == 5 * 16
    assert set(ledger["dropped"]) <= {"no_signal"}
    assert ledger["admitted"] == ledger["done"] + ledger["dropped"]["no_signal"]


def test_a_run_whose_groups_never_have_a_signal_ends_and_says_how_many_had_none(pipeline, tmp_path):
    (tmp_path / "same.py").write_text("def same(response):\n    return 1.0\n")
    path = pipeline(**SHORT, train={"steps": 2, "dynamic_sampling": 3}, reward={"fn": "same.py:same"})
    with pytest.raises(DataError, match=r"step 1 cannot be filled: 12 prompts .*no_signal: 48"):
        Flow.from_yaml(path).start().wait(300)


LEARNT = """
calls = 0


def learnt(response):
    global calls
    calls += 1
    return 1.0 if calls > 40 else float(len(set(response))) + calls / 1000
"""


def test_a_late_step_is_given_up_as_soon_as_the_first(pipeline, tmp_path):
    (tmp_path / "learnt.py").write_text(LEARNT)
    path = pipeline(**SHORT, train={"steps": 9, "dynamic_sampling": 2}, reward={"fn": "learnt.py:learnt"})
    with pytest.raises(DataError, match=r"step 3 cannot be filled: (8|9|10|11) prompts"):
        Flow.from_yaml(path).start().wait(300)


LATE_DROPS = """
import numpy as np
from asyncflow.stage import Drop, Part, stage


@stage(reads=["advantage", "group_id"], writes={"extra": "int64"})
def picks(batch):
    groups = batch["group_id"].array
    gone = groups % 3 == 2
    if gone.any():
        yield Drop(np.flatnonzero(gone), "picked out")
    if not gone.all():
        yield Part(np.flatnonzero(~gone), {"extra": groups[~gone]})
"""


@pytest.mark.parametrize("more", [["mode=async", "run_ahead=1"], ["mode=separated"]], ids=str)
def test_groups_that_leave_after_they_were_scored_hold_nothing_up(pipeline, tmp_path, more):
    (tmp_path / "late_drops.py").write_text(LATE_DROPS)
    stages = [{"fn": "late_drops.py:picks"}]
    path = pipeline(**SHORT, train={"steps": 5}, stages=stages, output={"samples_every": 1})
    summary = Flow.from_yaml(path, *more).start().wait(200)
    files = [pq.read_table(file).num_rows for file in sorted((summary.folder / "samples").glob("*.parquet"))]
    assert files == [16] * 5
    ledger = json.loads((summary.folder / "summary.json").read_text())["ledger"]
    assert (ledger["done"], set(ledger["dropped"])) == (80, {"picked out"})


def test_advantage_and_loss_may_be_the_users_own(pipeline, tmp_path):
    (tmp_path / "mine.py").write_text(
        "from asyncflow.algorithms.policy import pg\n\n\n"
        "def centred(rewards, groups):\n    return rewards - rewards.mean()\n\n\n"
        "def plain(logprobs, old, advantages, mask, clip_low, clip_high):\n"
        "    return pg(logprobs, old, 2 * advantages, mask, clip_low, clip_high)\n"
    )
    path = pipeline(**SHORT, train={"advantage": "mine.py:centred", "loss": "mine.py:plain", "steps": 2})
    summary = Flow.from_yaml(path).start().wait(300)
    assert all(step["grad_norm"] > 0 and step["clip_share"] == 0 for step in steps(summary.folder))
