import pytest

from asyncflow.config import explain
from asyncflow.config.names import _FOREIGN, foreign, hint, nearest


@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        ("lrr", ["lr", "eps"], "lr"),
        ("Group-Size", ["group_size"], "group_size"),
        ("xyz", ["lr"], None),
        ("a", [], None),
    ],
)
def test_nearest(name, options, expected):
    assert nearest(name, options) == expected


def test_a_hint_names_the_nearest_or_all():
    assert hint("lrr", ["lr", "eps"]) == " - did you mean 'lr'?"
    assert hint("xyz", ["lr", "eps"]) == "; allowed: lr, eps"
    assert hint("xyz", []) == ""


@pytest.mark.parametrize(
    ("name", "paths"),
    [
        ("num_generations", ("train.group_size",)),
        ("n", ("train.group_size",)),
        ("clip_ratio", ("train.clip_low", "train.clip_high")),
        ("Max-New-Tokens", ("rollout.max_response_tokens",)),
        ("model_name_or_path", ("model.path",)),
        ("no_such_key", ()),
    ],
)
def test_names_of_other_frameworks(name, paths):
    assert foreign(name) == paths


def test_every_foreign_name_leads_to_a_field_and_is_none_itself():
    for name, paths in _FOREIGN.items():
        for path in paths:
            section, key = path.split(".")
            assert key in explain.fields((section,)), path
            assert name not in explain.fields((section,)), name
