import math

import pytest

from asyncflow.config.document import Place, dotted, parse

START = Place(1, 1, 1, "f.yaml")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-5", 1e-5),
        ("1E5", 1e5),
        (".5", 0.5),
        ("1.", 1.0),
        ("-.inf", -math.inf),
        ("0x1f", 31),
        ("0o17", 15),
        ("010", 10),
        ("+3", 3),
        ("1_000", "1_000"),
        ("no", "no"),
        ("off", "off"),
        ("YES", "YES"),
        ("on", "on"),
        ("True", True),
        ("~", None),
        ("", None),
        ("1:30", "1:30"),
        ("2024-01-01", "2024-01-01"),
        ("'1'", "1"),
        ("[1, a, {b: null}]", [1, "a", {"b": None}]),
        ("{a: &x [1], b: *x}", {"a": [1], "b": [1]}),
    ],
)
def test_scalars_are_those_of_yaml_1_2(text, value):
    document = parse(text, START)
    assert document.tree == value
    assert type(document.tree) is type(value)
    assert not document.faults


def test_not_a_number_is_read():
    assert math.isnan(parse(".nan", START).tree)


def test_places_of_keys_and_values():
    document = parse("a:\n  b: 1\nc: [2, {d: 3}]\n", START)
    assert str(document.keys["a", "b"]) == "f.yaml:2:3"
    assert str(document.values["a", "b"]) == "f.yaml:2:6"
    assert str(document.values["c", 1, "d"]) == "f.yaml:3:12"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\nb: 2\na: 3", "f.yaml:3:1: a: the key is given twice (first in line 1)"),
        ("a: {b: 1, b: 2}", "f.yaml:1:11: a.b: the key is given twice (first in line 1)"),
        (
            "a: !!python/object:os.system x",
            "f.yaml:1:4: the tag tag:yaml.org,2002:python/object:os.system has no meaning here",
        ),
        ("a: !!int x", "f.yaml:1:4: 'x' does not fit its tag int"),
        ("? [1]\n: 2", "f.yaml:1:3: a key must be text"),
        ("a: &x [*x]", "f.yaml:1:4: this alias stands inside the value that it names"),
    ],
)
def test_faults_have_a_place_and_the_rest_is_read(text, message):
    document = parse(text, START)
    assert [str(fault) for fault in document.faults] == [message]
    assert not document.broken


@pytest.mark.parametrize("text", ["a: [1", "a: b: c", "\tx: 1", "a: 1\n--- \nb: 2", "a: *nowhere", "\x00"])
def test_what_is_not_yaml_is_broken(text):
    document = parse(text, START)
    assert document.broken
    assert "not valid YAML" in str(document.faults[0])


def test_a_route_reads_as_users_write_it():
    assert dotted(("stages", 0, "options", "x")) == "stages[0].options.x"
