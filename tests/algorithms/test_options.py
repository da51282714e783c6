import subprocess
import sys

import pytest

from asyncflow.algorithms import options as choices
from asyncflow.algorithms.advantages import ADVANTAGES as BY_ROW
from asyncflow.algorithms.filters import FILTERS
from asyncflow.algorithms.options import ADVANTAGES, BASE, BY_TOKEN, LOSSES, RECIPES, reads, resolve, scores, unused
from asyncflow.algorithms.policy import POLICIES
from asyncflow.config.training import Filter, Train


def test_every_name_is_that_of_a_function():
    assert set(LOSSES) == set(POLICIES)
    assert set(ADVANTAGES) == set(BY_ROW) | BY_TOKEN | {"none"}
    assert set(Filter.__args__) == set(FILTERS)
    for recipe in RECIPES:
        assert resolve(recipe, {})["advantage"] in ADVANTAGES
        assert resolve(recipe, {})["loss"] in LOSSES


def test_every_option_is_one_of_the_file_with_the_same_default():
    assert set(RECIPES) == set(Train.model_fields["algorithm"].annotation.__args__)
    for name, default in BASE.items():
        assert Train.model_fields[name].default == default, name
    for recipe, own in RECIPES.items():
        assert own.keys() <= BASE.keys()
        assert Train(algorithm=recipe).algorithm_options == resolve(recipe, {})


def test_every_recipe_has_effect_as_it_is():
    # Where the file sets a coefficient, what belongs to it has its value already.
    waiting = {"kl", "kl_in"}
    for recipe, own in RECIPES.items():
        lines = unused(recipe, own)
        assert {line.split()[0] for line in lines} <= waiting, recipe


@pytest.mark.parametrize("name", sorted(BASE))
def test_every_option_of_a_recipe_can_be_overridden(name):
    other = {"advantage": "rloo", "loss": "pg", "kl": "k1", "kl_in": "reward", "std": "biased",
             "aggregate": "seq-mean-token-sum", "aggregate_length": 3, "dual_clip": 3.0, "filters": {"policy": []},
             "off_policy": "tis", "off_policy_level": "sequence", "off_policy_metric": "k1",
             "off_policy_reduce": "sum", "whiten": True, "kl_unbiased": True}.get(name, 0.5)  # fmt: skip
    for recipe in RECIPES:
        assert resolve(recipe, {name: other})[name] == other


@pytest.mark.parametrize(
    ("recipe", "given", "words"),
    [
        ("rloo", {"std": "biased"}, ["std is not used by advantage rloo, only by grpo"]),
        ("dr_grpo", {"std": "unbiased"}, ["only by grpo"]),
        ("grpo", {"kl": "k1"}, ["kl_coef is 0"]),
        ("ppo", {"kl_coef": 0.1, "kl_unbiased": True}, ["kl_unbiased is not used by kl_in reward"]),
        ("grpo", {"aggregate_length": 4}, ["only by seq-mean-token-sum-norm"]),
        ("dr_grpo", {"aggregate": "token-mean", "aggregate_length": 4}, ["only by seq-mean-token-sum-norm"]),
        ("opd", {"clip_low": 0.1, "dual_clip": 2.0}, ["not used by loss pg", "dual_clip is not used by loss pg"]),
        ("grpo", {"off_policy": "tis", "clip_high": 0.3}, ["clip_high is not used by off_policy tis"]),
        ("grpo", {"off_policy": "tis", "dual_clip": 3.0}, ["dual_clip is not used by off_policy tis"]),
        ("grpo", {"advantage": "none", "overlong": 0.2}, ["overlong is not used by advantage none"]),
        ("grpo", {"advantage": "gae", "dynamic_sampling": 2}, ["dynamic_sampling is not used by advantage gae"]),
        ("grpo", {"off_policy_high": 4.0}, ["only by decoupled, tis, icepop, reject, a3po"]),
        ("grpo", {"off_policy": "decoupled", "off_policy_low": 0.1}, ["only by tis, icepop, reject"]),
        (
            "sft",
            {"loss": "pg", "lr": 1.0, "group_size": 8},
            ["loss has no effect with", "group_size has no effect with"],
        ),
        ("grpo", {"gamma": 0.9, "gae_lambda": 0.9}, ["gamma is not used", "gae_lambda is not used"]),
    ],
)
def test_an_option_without_effect_is_named(recipe, given, words):
    lines = unused(recipe, given)
    assert len(lines) == len(words)
    for line, word in zip(lines, words, strict=True):
        assert word in line


@pytest.mark.parametrize(
    ("recipe", "given"),
    [
        ("grpo", {"std": "biased", "lr": 1.0, "clip_low": 0.1}),
        ("grpo", {"kl": "k1", "kl_coef": 0.1}),
        ("dr_grpo", {"aggregate_length": 4}),
        ("rloo", {"aggregate": "seq-mean-token-sum-norm", "aggregate_length": 4}),
        ("grpo", {"loss": "mine.py:loss", "clip_low": 0.1}),
        ("grpo", {"loss": "mine.py:loss", "clip_low": 0.1, "off_policy": "tis"}),
        ("grpo", {"advantage": "mine.py:advantage", "dynamic_sampling": 2, "overlong": 0.2}),
        ("dapo", {"off_policy": "a3po", "off_policy_high": 5.0, "clip_high": 0.3}),
        ("ppo", {"gamma": 0.9, "gae_lambda": 0.9, "kl_coef": 0.1, "kl": "k3"}),
        ("sft", {"lr": 1.0, "steps": 3}),
    ],
)
def test_options_with_effect_pass(recipe, given):
    assert unused(recipe, given) == []


def test_what_a_recipe_has_gives_way_where_it_would_have_no_effect():
    assert resolve("dapo", {})["dynamic_sampling"] == 10
    found = resolve("dapo", {"advantage": "none", "distill_coef": 1.0})
    assert (found["dynamic_sampling"], found["overlong"]) == (0, 0.0)
    assert resolve("gspo", {"loss": "pg"})["clip_low"] == BASE["clip_low"]
    assert resolve("reinforce++", {})["kl_in"] == "loss"
    assert resolve("reinforce++", {"kl_coef": 0.1})["kl_in"] == "reward"


def test_columns_are_read_only_where_they_are_needed():
    assert reads(resolve("grpo", {})) == ("advantage", "rollout_logprobs")
    assert "ref_logprobs" in reads(resolve("grpo", {"kl_coef": 0.1}))
    assert "ref_logprobs" not in reads(resolve("ppo", {"kl_coef": 0.1}))
    assert "ages" in reads(resolve("grpo", {"off_policy": "a3po"}))
    assert "truncated" in reads(resolve("grpo", {"filters": {"policy": ["finished"]}}))
    assert scores(resolve("grpo", {})) == ()
    assert scores(resolve("grpo", {"kl_coef": 0.1, "kl_in": "reward"})) == (
        "response_mask", "rollout_logprobs", "ref_logprobs",
    )  # fmt: skip
    assert scores(resolve("ppo", {})) == ("response_mask", "values")
    assert scores(resolve("opd", {})) == ("response_mask", "rollout_logprobs", "teacher_logprobs")


def test_a_step_waits_for_its_rows_only_where_the_loss_must_know_them_all():
    assert [recipe for recipe in RECIPES if choices.whole(resolve(recipe, {}))] == [
        "reinforce++", "reinforce++-baseline", "ppo",
    ]  # fmt: skip
    assert choices.whole(resolve("grpo", {"filters": {"policy": ["signal"]}}))


def test_options_and_reports_need_no_torch():
    code = "import sys, asyncflow.algorithms.options, asyncflow.algorithms.report; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
