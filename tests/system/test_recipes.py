"""Every recipe trains: whole runs, and what is particular of each."""

import json

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
