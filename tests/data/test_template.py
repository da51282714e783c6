import pytest

from asyncflow.data.template import Template
from asyncflow.errors import ConfigError, DataError

ITEM = {"question": "1+1", "metadata": {"word": "cat", "n": 3}, "choices": ["x", "y"], "none": None, "a.b": 1}


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{question}=", "1+1="),
        ("{metadata[word]} {metadata[n]}", "cat 3"),
        ("{choices[1]}{{}}", "y{}"),
        ("{choices}", '["x", "y"]'),
        ("{a.b}", "1"),
        ("plain", "plain"),
    ],
)
def test_fields_are_filled_in(template, expected):
    assert Template(template).render(ITEM, "item 0") == expected


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{questoin}", "item 0 has no field 'questoin' - did you mean 'question'?"),
        ("{zz}", "item 0 has no field 'zz'; it has: question, metadata, choices, none, a.b"),
        ("{metadata[wrod]}", r"item 0 has no field 'metadata\[wrod\]' - did you mean 'word'?"),
        ("{choices[2]}", r"item 0 has no field 'choices\[2\]'; it has: 2 entries"),
        ("{question[0]}", r"item 0 has no field 'question\[0\]'"),
        ("{question.__class__}", "item 0 has no field"),
        ("{none}", "item 0: the field 'none' is null"),
    ],
)
def test_a_missing_field_names_item_and_fields(template, message):
    with pytest.raises(DataError, match=message):
        Template(template).render(ITEM, "item 0")


@pytest.mark.parametrize("template", ["{", "}", "{}", "{a!r}", "{a:.2f}", "{[x]}", "{a[}"])
def test_what_is_no_template_is_refused(template):
    with pytest.raises(ConfigError, match="template"):
        Template(template)


def test_a_lone_field_keeps_its_value():
    assert Template("{choices}").value(ITEM, "") == ["x", "y"]
    assert Template("{choices} ").value(ITEM, "") == '["x", "y"] '
    assert Template("{question} {metadata[n]}").fields == ("question", "metadata")
