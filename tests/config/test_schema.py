import jsonschema
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncflow.config.load import load
from asyncflow.config.schema import dump, schema

from .conftest import GOOD

text = st.text("ab1eE+-._:~#'\"\\ \n\té\u2028{}[]&*!|>%@`,?\U0001f600\x00\x7f\x85", max_size=6)
plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | text,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text, inner, max_size=3),
    max_leaves=6,
)


def reload(tmp_path, pipeline):
    file = tmp_path / "resolved.yaml"
    file.write_text(dump(pipeline))
    return load(file).pipeline


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["train.algorithm=dr_grpo", "train.lr=1e-4"],
        ["train={algorithm: sft, rows_per_step: 6, answers: ['{a}']}"],
        ["train.algorithm=ppo"],
        ["train={algorithm: ppo, group_size: 1}", "critic={clip: null, warmup: 3}"],
        ["train.algorithm=rloo", "train.kl_coef=0.1", "train.kl=k1", "reward.timeout=500ms"],
        [
            "warmup={steps: 3}",
            "eval={rows: 3, every: 1}",
            "train.rows_per_step=16",
            "rollout.stop=['no', '1e-5', '#', null]",
        ][:3],
        ["stages=[{fn: json:dumps, reads: [a], writes: {b: float32}}]", "executor.threads=2", "output=runs/no"],
    ],
)
def test_a_dump_loads_as_an_equal_pipeline(good, tmp_path, overrides):
    pipeline = load(good, overrides).pipeline
    again = reload(tmp_path, pipeline)
    assert again == pipeline
    assert dump(again) == dump(pipeline)


@settings(deadline=None, max_examples=25)
@given(st.dictionaries(text, plain, max_size=3))
def test_options_survive_a_dump(tmp_path_factory, options):
    pipeline = load([], base={**GOOD, "rollout": {"options": options}}).pipeline
    assert reload(tmp_path_factory.getbasetemp(), pipeline).rollout.options == options


@pytest.mark.parametrize(
    "text", ["no", "1e-5", "0o17", "~", "2024-01-01", "1_000", "true", ".inf", "yes", "a: b", " x ", ""]
)
def test_text_that_yaml_may_misread_is_quoted_for_both_versions(text):
    pipeline = load([], base={**GOOD, "rollout": {"options": {"x": text}}}).pipeline
    assert yaml.safe_load(dump(pipeline))["rollout"]["options"]["x"] == text


def test_every_field_is_written_and_what_has_no_effect_is_a_comment(good):
    text = dump(load(good, ["train.algorithm=rloo"]).pipeline)
    assert "  # std: unbiased  (is not used by advantage rloo, only by grpo)" in text
    tree = yaml.safe_load(text)
    assert tree["train"]["clip_low"] == 0.2
    assert set(tree) >= {"model", "data", "rollout", "weights", "executor", "output", "seed"}


def test_the_schema_accepts_what_loads_and_refuses_a_slip(good):
    validator = jsonschema.Draft202012Validator(schema())
    tree = {**GOOD, "reward": {"fn": "exact_match", "timeout": "5s"}, "output": "runs/x", "train": {"lr": 1e-5}}
    validator.validate(tree)
    validator.validate(yaml.safe_load("{seed: 3, output: {folder: x}}") | GOOD)
    for wrong in (
        {"train": {"lrr": 1}},
        {"reward": {"fn": "x", "timeout": "soon"}},
        {"train": {"algorithm": "gppo"}},
        {"seed": -1},
    ):
        assert not validator.is_valid({**GOOD, **wrong})


def test_every_field_of_the_schema_is_documented():
    document = schema()
    for section in (document, *document["$defs"].values()):
        for name, field in section["properties"].items():
            assert field.get("description") or "$ref" in field, name
        assert section is document or section["description"]
