from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncflow.config.check import BUILT_IN_REWARDS, check
from asyncflow.config.fields import OnStale
from asyncflow.config.load import load
from asyncflow.config.model import Pipeline
from asyncflow.errors import ConfigError
from asyncflow.rewards.scorers import BUILT_IN
from asyncflow.stages.plan import plan
from asyncflow.types import StalePolicy


@pytest.fixture
def teachers(folder):
    """Folders of models that know fewer tokens than the policy, as many, and more."""
    for name, size in (("small", 5), ("good", 57), ("large", 100)):
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(f'{{"vocab_size": {size}}}')


NEW = "model={config: {model_type: llama}, tokenizer: characters}"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["train.rows_per_step=250"],
            "train.rows_per_step: 250 is not a multiple of train.group_size 8: use 248 or 256",
        ),
        (["train.rows_per_step=5"], "train.rows_per_step: 5 is not a multiple of train.group_size 8: use 8"),
        (
            ["train.rows_per_step=16", "train.prompts_per_step=3"],
            "train.rows_per_step: 16 is not train.prompts_per_step 3 times train.group_size 8 = 24: give",
        ),
        (["weights.channel=inproc"], "weights.channel: inproc is for engines in the trainer's process"),
        (["weights.channel=collective", "weights.delta=true"], "weights.delta: has no effect with channel collective"),
        (["weights.host=0.0.0.0"], "weights.host: has no effect with channel file"),
        (["train.group_size=1"], "train.group_size: 1 leaves grpo nothing to compare"),
        (
            ["train.token_budget=700"],
            "train.token_budget: 700 is less than the longest row, data.max_prompt_tokens 512 + ",
        ),
        (
            ["max_staleness=1"],
            "max_staleness: has no effect in mode separated, which trains nothing that is stale: use",
        ),
        (["mode=streaming", "on_stale=drop"], "on_stale: has no effect in mode streaming"),
        (["run_ahead=1"], "run_ahead: has no effect in mode separated"),
        (["rollout.backend=emulated"], "train.backend: 'torch' cannot work with what emulated engines make up"),
        (
            ["rollout.backend=emulated", "train={backend: emulated, data_parallel: 2}"],
            "train.data_parallel: the emulated engine is one process",
        ),
        (
            ["rollout.backend=emulated", "train={backend: emulated, packing: true}"],
            "train.packing: the emulated engine has no padding to leave out",
        ),
        (["train={packing: true, options: {packing: false}}"], "train.options: False is not train.packing True: give"),
        (["mode=async", "deterministic=true"], "deterministic: cannot hold in mode async"),
        (["reward.retries=1"], "reward.retries: has no effect without `retry` for one of on_timeout, on_error, on_"),
        (["mode=async", "max_requeues=1"], "max_requeues: has no effect without `on_stale: requeue`"),
        (
            ["mode=async", "run_ahead=3"],
            "run_ahead: 3 steps are never ahead: max_staleness 1 admits 2; use at most that",
        ),
        (["weights.kv=recompute"], "weights.kv: has no effect in mode separated, in which nothing runs while weights"),
        (
            ["mode=streaming", "weights={kv: recompute, apply: drain}"],
            "weights.kv: has no effect with weights.apply drain, which interrupts no response: use `apply: interrupt`",
        ),
        (
            ["executor.stall_timeout=90", "executor.wait_timeout=60"],
            "executor.stall_timeout: 90 s is never reached: executor.wait_timeout ends the run after 60 s; use less",
        ),
        (["train.lr_warmup=200"], "train.lr_warmup: 200 is more than train.steps 100"),
        (["critic={lr: 1e-4}"], "critic: is not used by advantage grpo, only by gae: leave it out, or use `algorithm:"),
        (
            ["train={algorithm: ppo, steps: 5}", "critic.warmup=5"],
            "critic.warmup: 5 leaves none of train.steps 5 in which the policy learns: use fewer",
        ),
        (["train.algorithm=ppo", "critic.path=nowhere"], "critic.path: nowhere does not exist"),
        (["train.algorithm=ppo", "critic.clip=0"], "critic.clip: expected more than 0"),
        (["train.kl=k1"], "train.kl: has no effect while kl_coef is 0"),
        (["train.algorithm=rloo", "train.std=biased"], "train.std: is not used by advantage rloo, only by grpo"),
        (
            ["train.aggregate_length=9"],
            "train.aggregate_length: is not used by aggregate token-mean, only by seq-mean-token-sum-norm",
        ),
        (
            ["train.loss=gpso"],
            "train.loss: neither known nor `module:function` of your own: 'gpso' - did you mean 'gspo'?",
        ),
        (["train.advantage=no.py:f"], "train.advantage: no.py does not exist"),
        (["train.filters={kl: [finished]}"], "train.filters.kl: has no effect while kl_coef is 0"),
        (
            ["train.off_policy=tis", "train.off_policy_low=3"],
            "train.off_policy_low: 3 is not below off_policy_high 2",
        ),
        (
            ["train.off_policy=tis", "train.clip_high=0.3"],
            "train.clip_high: is not used by off_policy tis, only by none, a3po",
        ),
        (
            ["train.advantage=reinforce++", "train.dynamic_sampling=3"],
            "train.dynamic_sampling: is not used by advantage reinforce++, only by dr_grpo, grpo, maxrl",
        ),
        (["train.advantage=none"], "train.advantage: none trains nothing by itself: give distill_coef"),
        (
            ["train={advantage: none, kl_coef: 0.1, kl_in: reward}"],
            "train.kl_in: reward has no effect with advantage none, which reads no reward: use `kl_in: loss`",
        ),
        (["train.filters={policy: []}"], "train.filters.policy: has no effect while it names no filter"),
        (
            ["train={kl_coef: 0.1, kl_in: reward, filters: {kl: [finished]}}"],
            "train.filters.kl: has no effect with kl_in reward, which is no part of the loss",
        ),
        (
            ["train={off_policy: reject, off_policy_metric: k1}"],
            "train.off_policy_metric: k1 has either sign: give off_policy_low, for example -2",
        ),
        (
            ["train={off_policy: tis, off_policy_low: -0.5}"],
            "train.off_policy_low: -0.5: only the metric k1 falls below 0",
        ),
        (["data.size=10", "eval.rows=10"], "eval.rows: 10 held-out prompts of data.size 10 leave none to train on"),
        (
            ["train.algorithm=opd"],
            "teacher: train.distill_coef 1 needs a teacher: give `path`, a folder in Hugging Face",
        ),
        (["train.distill_coef=0.5"], "teacher: train.distill_coef 0.5 needs a teacher"),
        (["teacher={path: good}"], "teacher: has no effect while train.distill_coef is 0: use `algorithm: opd`, or"),
        (["train.algorithm=opd", "teacher.path=nowhere"], "teacher.path: nowhere does not exist in "),
        (["train.algorithm=opd", "teacher.path=."], "has no config.json: expected a folder in Hugging Face format"),
        (["train.algorithm=opd", "teacher.path=small"], "small knows 5 tokens, and the policy 57: expected the same"),
        (["train.algorithm=opd", "teacher={}"], "teacher.path: is missing: folder in Hugging Face format, with the "),
        (
            ["train={algorithm: opd, dynamic_sampling: 2}", "teacher.path=large"],
            "train.dynamic_sampling: is not used by advantage none, only by dr_grpo, grpo, maxrl",
        ),
        (
            ["train={algorithm: opd, advantage: rloo, group_size: 1}", "teacher.path=large"],
            "train.group_size: 1 leaves rloo nothing to compare a response with",
        ),
        (["train.answers=['{a}']"], "train.answers: has no effect without `algorithm: sft`"),
        (["train={algorithm: sft, answers: ['{a']}"], "train.answers[0]: "),
        (
            ["train={algorithm: sft, clip_low: 0.1}"],
            "train.clip_low: has no effect with algorithm sft, which trains on",
        ),
        (["train={algorithm: sft, group_size: 8}"], "train.group_size: has no effect with algorithm sft, which trains"),
        (["train={algorithm: sft, dynamic_sampling: 0}"], "train.dynamic_sampling: has no effect with algorithm sft"),
        (["train={algorithm: sft, reward: reward}"], "train.reward: has no effect with algorithm sft"),
        (["train.algorithm=sft", "warmup.steps=3"], "warmup: is supervised training before another: give its steps to"),
        (["train.algorithm=sft", "mode=async"], "mode: async is for responses, and train.algorithm sft generates none"),
        (["train.algorithm=sft", "rollout.temperature=0.7"], "rollout.temperature: has no effect with train.algorithm"),
        (["train.algorithm=sft", "stages=[{fn: json:dumps}]"], "stages: have no row to see with train.algorithm sft"),
        (["train.algorithm=sft", "teacher.path=good"], "teacher: has no effect while train.distill_coef is 0"),
        (["eval.every=3"], "eval.every: has no effect while eval.rows is 0"),
        (["eval.source=python"], "eval.source: has no effect while eval.rows is 0"),
        (
            ["eval={rows: 3, samples: 4}"],
            "eval.samples: 4 responses at temperature 0 would all be the same: give `eval.temperature`",
        ),
        (
            ["eval={rows: 3, samples: 4, temperature: 1, k: [1, 8]}"],
            "eval.k[1]: 8 is more than eval.samples 4: raise that, or use at most as many",
        ),
        (["eval={rows: 3, every: 1, max_inflight: 0}", "mode=async"], "eval.max_inflight: expected"),
        (
            ["eval={rows: 3, every: 1, samples: 4, temperature: 1, max_inflight: 3}", "mode=async"],
            "eval.max_inflight: 3 is less than eval.samples 4, which begin together",
        ),
        (
            ["eval={rows: 3, every: 1, max_inflight: 3}"],
            "eval.max_inflight: has no effect in mode separated, which evaluates between two steps",
        ),
        (
            ["eval={rows: 3, every: 1, max_inflight: 3}", "mode=streaming", "deterministic=true"],
            "eval.max_inflight: has no effect with `deterministic`, which evaluates between two steps",
        ),
        (["eval={rows: 3, max_inflight: 3}", "mode=async"], "eval.max_inflight: has no effect without eval.every"),
        (["eval={rows: 3, answer: json:dumps}"], "eval.answer: has no effect while eval.samples is 1"),
        (
            ["eval={rows: 3, samples: 2, temperature: 1, answer: nowhere.py:f}"],
            "eval.answer: nowhere.py does not exist in ",
        ),
        (["eval.k=[1]"], "eval.k: has no effect while eval.rows is 0"),
        (
            ["data.source=reasoning_gym:chain_sum"],
            "data.source: reasoning_gym makes items without end: give `data.size`",
        ),
        (['data.source="reasoning_gym:"', "data.size=9"], "data.source: expected `reasoning_gym:TASK`"),
        (["data.source=json:x"], "data.source: unknown kind of source 'json' - did you mean 'jsonl'?"),
        (["data.source=x.jsonl"], "data.source: unknown kind of source 'x.jsonl'; use `jsonl:FILE`"),
        (["data.source=jsonl:god.yaml"], "data.source: god.yaml does not exist in "),
        (["data.source=jsonl:."], "is a folder: expected a file"),
        (["data.source=python:x"], "data.source: `python` takes nothing behind it"),
        (["data.options={a: 1}"], "data.options: python takes no options"),
        (["reward.fn=reasoning_gym"], "reward.fn: reasoning_gym scores only its own tasks: data.source is 'python'"),
        (
            ["reward.fn=exact"],
            "`file.py:function` or a built-in, found 'exact' - did you mean 'exact_match'?",
        ),
        (["reward.fn=nowhere.py:f"], "reward.fn: nowhere.py does not exist in "),
        (["reward.fn=no_such_module:f"], "reward.fn: no module 'no_such_module', neither installed (sys.path of "),
        (["reward.fn=json.nothing:f"], "reward.fn: no module 'json.nothing', neither"),
        (["reward.fn=json:dump_s"], "has no 'dump_s' - did you mean 'dumps'?"),
        (["reward.fn=json:1f"], "reward.fn: expected `module:function` or `file.py:function`"),
        (["reward.options={a: 1}"], "reward.options: exact_match takes no options"),
        (["stages=[{fn: nowhere}]"], "stages[0].fn: expected `module:function` or `file.py:function`"),
        (["model.config.model_type=null"], "model.config: needs `model_type`"),
        (["model.tokenizer=null"], "model: a new model needs `model.tokenizer`"),
        (["model.path=."], "model.config: `path` and `config` are both given"),
        (["model.config=null"], "model: give `path` (a folder) or `config` (a new model)"),
        (["model.config=null", "model.path=nowhere"], "model.path: nowhere does not exist in "),
        (["model.config=null", "model.path=good.yaml"], "good.yaml is a file: expected a folder"),
        (["model.tokenizer=character"], "model.tokenizer: no folder 'character' - did you mean 'characters'?"),
        (["model.characters=abca"], "model.characters: each character of the alphabet once, found 'a' twice"),
        (
            ["model.tokenizer=.", "model.characters=abc"],
            "model.characters: has no effect without `tokenizer: characters`",
        ),
    ],
)
def test_what_does_not_go_together_is_refused(check_lines, teachers, overrides, message):
    (line,) = check_lines(*overrides)
    assert message in line


@pytest.mark.parametrize(
    "overrides",
    [
        ["train.rows_per_step=16", "train.prompts_per_step=2"],
        ["train.kl=k1", "train.kl_coef=0.1"],
        ["weights.channel=tcp", "weights.delta=true", "weights.host=::1"],
        ["train.algorithm=dr_grpo", "train.aggregate_length=100"],
        ["train.aggregate=seq-mean-token-sum-norm", "train.aggregate_length=9"],
        ["reward.fn=json:dumps"],
        ["train={algorithm: opd, group_size: 1}", "teacher.path=large"],
        ["train={algorithm: sft, rows_per_step: 7, answers: ['{a}']}", "mode=colocated"],
        ["train={algorithm: sft, prompts_per_step: 7, lr_warmup: 3, packing: true}"],
        ["train={algorithm: grpo, distill_coef: 0.5}", "teacher.path=good"],
        ["train={algorithm: opd, group_size: 1}", "teacher.path=small", "model.config.vocab_size=5"],
        ["model.config=null", "model.path=."],
        ["data.source=python", "data.size=11", "eval.rows=10", "eval.every=5"],
        ["mode=async", "eval={rows: 3, every: 1, samples: 4, temperature: 1, k: [1, 4], answer: json:dumps}"],
        ["mode=streaming", "eval={rows: 3, every: 1, max_inflight: 1}"],
    ],
)
def test_what_goes_together_passes(check_lines, teachers, overrides):
    assert check_lines(*overrides) == []


def test_a_file_with_a_syntax_error_is_named_with_its_line(good, check_lines):
    with open("bad.py", "w") as file:
        file.write("x = 1\ndef f(:\n")
    (line,) = check_lines("reward.fn=bad.py:f")
    assert "bad.py:2: invalid syntax" in line


def test_defaults_of_the_algorithm_are_filled_in(good):
    assert load(good, ["train.algorithm=dr_grpo"]).pipeline.train.aggregate == "seq-mean-token-sum-norm"
    explicit = ["train.algorithm=dr_grpo", "train.aggregate=token-mean"]
    assert load(good, explicit).pipeline.train.aggregate == "token-mean"


def test_a_pipeline_made_in_python_is_checked_the_same_way():
    pipeline = Pipeline.model_validate(
        {"model": {}, "data": {"source": "python"}, "reward": {"fn": "char_match"}, "train": {"rows_per_step": 12}}
    )
    assert [problem.route for problem in check(pipeline)] == [("model",), ("train", "rows_per_step")]


def test_policies_are_those_that_the_gate_knows():
    assert get_args(OnStale) == get_args(StalePolicy)


@pytest.mark.parametrize("bound", [0, 1, 4])
def test_a_bound_of_zero_is_a_bound(good, check_lines, bound):
    assert (check_lines("mode=streaming", f"max_staleness={bound}") == []) == (bound == 0)
    chosen = ["mode=async", f"max_staleness={bound}", "on_stale=wait"]
    assert check_lines(*chosen) == []
    assert load(good, chosen).pipeline.staleness == bound


def test_the_names_of_built_in_rewards_are_those_there_are():
    assert {*BUILT_IN, "reasoning_gym"} == set(BUILT_IN_REWARDS)


def test_problems_keep_the_place_of_the_file(folder):
    (folder / "f.yaml").write_text("model: {path: modle}\ndata: {source: python}\nreward: {fn: exact_match}\n")
    (folder / "model").mkdir()
    with pytest.raises(
        ConfigError, match=r"^f.yaml:1:15: model.path: modle does not exist in .* - did you mean 'model'\?"
    ):
        load("f.yaml")


CHOICES = {
    "mode": ["colocated", "separated", "streaming", "async"],
    "on_stale": [None, "mask", "drop", "requeue", "wait"],
    "max_staleness": [None, 0, 1, 4],
    "max_requeues": [None, 0, 2],
    "run_ahead": [None, 1, 3],
    "deterministic": [None, True],
    "weights.apply": [None, "interrupt", "drain", "boundary"],
    "weights.kv": [None, "keep", "recompute"],
    "weights.channel": [None, "inproc", "shm", "tcp", "file", "collective"],
    "weights.delta": [None, True],
    "rollout.max_inflight": [None, 1, 64],
    "rollout.replicas": [None, 2],
    "train.data_parallel": [None, 2],
    "train.packing": [None, True],
}


@given(st.fixed_dictionaries({name: st.sampled_from(values) for name, values in CHOICES.items()}))
@settings(max_examples=300, deadline=None)
def test_every_combination_is_planned_or_refused_with_a_field_of_it_to_change(chosen):
    overrides = [f"{name}={str(value).lower()}" for name, value in chosen.items() if value is not None]
    base, mistakes = {"data": {"source": "python"}, "reward": {"fn": "exact_match"}}, ""
    try:
        tables = plan(load([], [NEW, *overrides], base).pipeline).tables
    except ConfigError as error:
        mistakes = str(error)
    if mistakes:
        assert any(value is not None and name in mistakes for name, value in chosen.items()), mistakes
    else:
        assert [stage.name for stage in tables["train"].stages if stage.durable] == ["train"]
