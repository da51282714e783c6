import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncflow.config.load import load
from asyncflow.config.model import Pipeline
from asyncflow.errors import ConfigError

from .conftest import GOOD

HEAD = """\
model: {config: {model_type: llama}, tokenizer: characters}
data: {source: python}
reward: {fn: exact_match}
"""


def problems(*files, overrides=()):
    with pytest.raises(ConfigError) as caught:
        load(files, overrides)
    return list(caught.value.problems)


def mistakes(folder, text):
    (folder / "f.yaml").write_text(HEAD + text)
    return problems("f.yaml")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("train: {lrr: 1}", "f.yaml:4:9: train.lrr: unknown key - did you mean 'lr'?"),
        ("trian: {lr: 1}", "f.yaml:4:1: trian: unknown key - did you mean 'train'?"),
        (
            "train: {num_generations: 4}",
            "f.yaml:4:9: train.num_generations: unknown key: it is called `train.group_size` here",
        ),
        ("learning_rate: 1", "f.yaml:4:1: learning_rate: unknown key: it is called `train.lr` here"),
        (
            "train: {epsilon: 0.1}",
            "f.yaml:4:9: train.epsilon: unknown key: it is called `train.clip_low` and `train.clip_high` here",
        ),
        (
            "train: {temperature: 1}",
            "f.yaml:4:9: train.temperature: unknown key here: did you mean `rollout.temperature` or",
        ),
        ("train: {lr: fast}", "f.yaml:4:13: train.lr: expected a number, found the text 'fast'"),
        ("train: {lr: '1e-5'}", "f.yaml:4:13: train.lr: expected a number, found the text '1e-5'"),
        ("train: {steps: 1.5}", "f.yaml:4:16: train.steps: expected a whole number, found 1.5"),
        ("train: {steps: true}", "f.yaml:4:16: train.steps: expected a whole number, found true"),
        ("train: {steps: 0}", "f.yaml:4:16: train.steps: expected at least 1, found 0"),
        ("train: {lr: .inf}", "f.yaml:4:13: train.lr: expected a finite number, found inf"),
        ("train: {dual_clip: 1}", "f.yaml:4:20: train.dual_clip: expected more than 1, found 1"),
        ("train: {betas: [0.9]}", "f.yaml:4:9: train.betas[1]: is missing"),
        ("train: {betas: 3}", "f.yaml:4:16: train.betas: expected a list, found 3"),
        ("train: [1]", "f.yaml:4:8: train: expected a mapping with keys of backend, algorithm"),
        (
            "train: {algorithm: gpro}",
            "f.yaml:4:20: train.algorithm: expected grpo or dr_grpo or dapo or",
        ),
        ("eval: {rows: 5, correct_at: yes}", "f.yaml:4:29: eval.correct_at: expected a number, found the text 'yes'"),
        ("warmup: {lr: 0.1}", "f.yaml:4:1: warmup.steps: is missing: optimizer steps"),
        (
            "weights: {timeout: soon}",
            "f.yaml:4:20: weights.timeout: expected a duration such as 5s, 500ms or 2m, found the text 'soon'",
        ),
        ("stages: [{fn: json:dumps}, {fnn: x}]", "f.yaml:4:29: stages[1].fnn: unknown key - did you mean 'fn'?"),
        ("rollout: {stop: ok}", "f.yaml:4:17: rollout.stop: expected a list, found the text 'ok'"),
        ("zzzzz: 1", "f.yaml:4:1: zzzzz: unknown key; allowed: model, data, reward"),
    ],
)
def test_a_mistake_is_named_with_its_place(folder, text, message):
    (line,) = mistakes(folder, text)
    assert line.startswith(message)


def test_braces_that_yaml_took_for_a_mapping_are_explained(folder):
    (folder / "f.yaml").write_text(HEAD.replace("source: python", "source: python, prompt: {question}"))
    assert problems("f.yaml")[0].endswith(
        "expected text, found a mapping - text with braces, brackets or a colon needs quotes"
    )


def test_every_mistake_is_reported_at_once_in_reading_order(folder):
    (folder / "f.yaml").write_text(
        "data: {source: python, shuffle: yes}\nreward: {fn: exact_match}\n"
        "train:\n  group_size: 3\n  rows_per_step: 250\n  lrr: 1\n  group_size: 4\n  kl: k1\nmodel: {}\n"
    )
    found = problems("f.yaml", overrides=["seed=-1", "nonsense", "rollout.max_tokens=3"])
    assert [line.partition(": ")[0] for line in found] == [
        "f.yaml:1:33",
        "f.yaml:5:18",
        "f.yaml:6:3",
        "f.yaml:7:3",
        "f.yaml:8:3",
        "f.yaml:9:1",
        "override 'seed=-1'",
        "override 'nonsense'",
        "override 'rollout.max_tokens=3'",
    ]


def test_a_wrong_value_does_not_cause_complaints_about_what_rests_on_it(folder):
    found = mistakes(folder, "train: {group_size: many, rows_per_step: 250}\neval: {rows: lots, every: 3}")
    assert len(found) == 2
    assert "train.group_size" in found[0]
    assert "eval.rows" in found[1]


def test_a_slip_in_a_required_key_is_one_mistake(folder):
    (folder / "f.yaml").write_text(HEAD.replace("{fn:", "{func:"))
    assert problems("f.yaml") == ["f.yaml:3:10: reward.func: unknown key - did you mean 'fn'?"]


def test_missing_sections_are_named_with_what_they_are_for(folder):
    (folder / "f.yaml").write_text("# nothing\n")
    assert [line.partition(": is missing: ")[0] for line in problems("f.yaml")] == [
        f"f.yaml:1:1: {section}" for section in ("model", "data", "reward")
    ]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("f.yaml", b"a: [1", "f.yaml:1:6: not valid YAML"),
        ("f.yaml", b"- 1\n", "f.yaml:1:1: expected a mapping with keys of model, data"),
        ("f.yaml", b"a: \xff", "f.yaml: is not UTF-8"),
        ("g.yaml", b"", "f.yaml: f.yaml does not exist in "),
    ],
)
def test_an_unreadable_file_is_named(folder, name, content, message):
    (folder / name).write_bytes(content)
    (line,) = problems("f.yaml")
    assert line.startswith(message)


def test_the_nearest_file_is_offered(folder, good):
    assert problems("goof.yaml")[0].endswith("- did you mean 'good.yaml'?")


def test_files_merge_left_to_right_and_overrides_come_last(folder, good):
    (folder / "more.yaml").write_text("train: {lr: 1e-5, steps: 3}\noutput: runs/x\n")
    (folder / "last.yaml").write_text("train: {steps: 4, eps: null}\noutput: {samples_every: 7}\n")
    pipeline = load([good, "more.yaml", "last.yaml"], ["train.lr=1e-4", "seed=7"]).pipeline
    assert (pipeline.train.lr, pipeline.train.steps, pipeline.train.eps) == (1e-4, 4, 1e-8)
    assert (pipeline.output.folder, pipeline.output.samples_every, pipeline.seed) == ("runs/x", 7, 7)


def test_a_base_lies_below_the_files(folder, good):
    base = {"train": {"lr": 0.5, "steps": 9}, "data": {"source": "nothing"}}
    (folder / "more.yaml").write_text("train: {lr: 0.25}")
    pipeline = load([good, "more.yaml"], base=base).pipeline
    assert (pipeline.train.lr, pipeline.train.steps, pipeline.data.source) == (0.25, 9, "python")
    assert load([], ["seed=3"], base=pipeline).pipeline == pipeline.model_copy(update={"seed": 3})
    with pytest.raises(ConfigError, match=r"base: train\.lrr: unknown key"):
        load(good, base={"train": {"lrr": 1}})


def test_null_gives_the_default_back_but_stays_inside_options(folder, good):
    (folder / "more.yaml").write_text("train: {lr: 0.5}\nrollout: {options: {a: null, b: 1}}\nwarmup:\n")
    pipeline = load(
        [good, "more.yaml"], ["train.lr=null", "rollout.options.b=null", "train.prompts_per_step=null"]
    ).pipeline
    assert pipeline.train.lr == 1e-6
    assert pipeline.rollout.options == {"a": None}
    assert pipeline.warmup is None


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.lrr=1", "override 'train.lrr=1': train.lrr: unknown key - did you mean 'lr'?"),
        ("trian.lr=null", "override 'trian.lr=null': trian: unknown key - did you mean 'train'?"),
        ("train.lrr=null", "override 'train.lrr=null': train.lrr: unknown key - did you mean 'lr'?"),
        ("train.lr=x", "override 'train.lr=x': train.lr: expected a number, found the text 'x'"),
        ("train.lr", "override 'train.lr': expected `section.key=value`"),
        ("train..lr=1", "override 'train..lr=1': expected `section.key=value`"),
        ("=1", "override '=1': expected `section.key=value`"),
        ("train.lr=", "override 'train.lr=': no value: `train.lr=null` unsets"),
        ("train.lr=[1", "override 'train.lr=[1': not valid YAML"),
        ("train.lr.x=1", "override 'train.lr.x=1': train.lr: expected a number, found a mapping"),
        ("stages.3.fn=a", "override 'stages.3.fn=a': stages.3.fn: 3 is not an index of a list of 1"),
    ],
)
def test_a_bad_override_is_named(folder, good, override, message):
    (folder / "more.yaml").write_text("stages: [{fn: json:dumps}]")
    (line,) = problems(good, "more.yaml", overrides=[override])
    assert line.startswith(message)


def test_overrides_reach_into_lists_and_mappings(folder, good):
    (folder / "more.yaml").write_text("stages: [{fn: json:dumps, reads: [a]}]\nrollout: {stop: [a, b]}")
    overrides = [
        "stages.0.options={x: 1e3}",
        "stages.0.options.y=no",
        "rollout.stop.1=c",
        "output=runs/y",
        "train={steps: 2}",
    ]
    pipeline = load([good, "more.yaml"], overrides).pipeline
    assert pipeline.stages[0].options == {"x": 1000.0, "y": "no"}
    assert pipeline.rollout.stop == ["a", "c"]
    assert (pipeline.output.folder, pipeline.train.steps) == ("runs/y", 2)


@settings(deadline=None, max_examples=25)
@given(st.floats(min_value=1e-12, max_value=1e6), st.integers(1, 10**6), st.text("abc .:'{}[]#é", max_size=12))
def test_overrides_carry_any_value(lr, steps, text):
    quoted = yaml.safe_dump(text, default_style='"', allow_unicode=True).strip()
    overrides = [f"train.lr={lr!r}", f"train.steps={steps}", "data.options={}", f"rollout.options.x={quoted}"]
    pipeline = load([], overrides, base=GOOD).pipeline
    assert (pipeline.train.lr, pipeline.train.steps, pipeline.rollout.options["x"]) == (lr, steps, text)


@settings(deadline=None, max_examples=25)
@given(
    st.dictionaries(
        st.sampled_from(["lr", "steps", "eps", "lr_warmup"]),
        st.one_of(st.text("a1.e-"), st.none(), st.integers(), st.booleans()),
        max_size=4,
    )
)
def test_whatever_stands_in_the_file_there_is_a_pipeline_or_a_config_error(values):
    try:
        loaded, lines = load([], base={**GOOD, "train": values}), ()
    except ConfigError as error:
        loaded, lines = None, error.problems
    assert (loaded is not None and isinstance(loaded.pipeline, Pipeline)) or lines
    assert all(line.startswith("base: train.") for line in lines)


def test_paths_start_from_here_or_from_the_folder_of_the_file(folder):
    there = folder / "there"
    there.mkdir()
    for name in ("near.jsonl", "rewards.py", "stages.py"):
        (there / name).write_text("def f(response): return 1\n")
    (folder / "near.jsonl").write_text("{}")
    (there / "f.yaml").write_text(
        HEAD.replace("source: python", "source: 'jsonl:near.jsonl'").replace("exact_match", "rewards.py:f")
        + "stages: [{fn: stages:f}]\neval: {source: jsonl:near.jsonl, rows: 1}\n"
    )
    pipeline = load("there/f.yaml").pipeline
    assert pipeline.data.source == f"jsonl:{folder / 'near.jsonl'}"
    assert pipeline.reward.fn == f"{there / 'rewards.py'}:f"
    assert pipeline.stages[0].fn == f"{there / 'stages.py'}:f"
    with pytest.raises(ConfigError, match=r"override .*rewards.py does not exist in "):
        load("there/f.yaml", ["reward.fn=rewards.py:f"])


def test_loading_imports_nothing_heavy_nor_the_users_code(good):
    (Path(good).parent / "boom.py").write_text("raise SystemExit('imported')\ndef f(response): return 1\n")
    code = (
        "import sys; from asyncflow.config.load import load; load('good.yaml', ['reward.fn=boom.py:f']);"
        "heavy = {'torch', 'transformers', 'pyarrow', 'zmq', 'numpy', 'reasoning_gym', 'datasets'};"
        "print(*sorted(heavy & set(sys.modules)))"
    )
    root = str(Path(__file__).parents[2])
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={"PYTHONPATH": root}, check=False, timeout=60
    )
    assert (done.returncode, done.stdout.strip()) == (0, ""), done.stderr
