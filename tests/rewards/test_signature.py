import json

import numpy as np
import pytest

from asyncflow.errors import ConfigError, RewardError
from asyncflow.rewards.signature import Sample, adapt

ITEM = {"prompt": "raw", "word": "cat", "extra_info": {"k": 1}, "data_source": "gsm8k"}
SAMPLE = Sample("re", "pr", "an", json.dumps(ITEM), "src")


def ours(response, prompt, answer, item, word, scale=1):
    return scale * (f"{response}{prompt}{answer}{item['word']}{word}" == "reprancatcat")


def positional(response, /, word, *, answer):
    return (response, word, answer) == ("re", "cat", "an")


def everything(response, **rest):
    return rest == {"prompt": "pr", "answer": "an", "item": ITEM, **{k: v for k, v in ITEM.items() if k != "prompt"}}


async def awaited(response):
    return 0.5


def verl(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": (data_source, solution_str, ground_truth, extra_info) == ("gsm8k", "re", "an", {"k": 1})}


def trl(completions, prompts, word, answer, **kwargs):
    return [float((completions, prompts, word, answer) == (["re"], ["pr"], ["cat"], ["an"]))]


@pytest.mark.parametrize(
    ("function", "options", "score"),
    [
        (ours, {}, 1.0),
        (ours, {"scale": 3}, 3.0),
        (positional, {}, 1.0),
        (everything, {}, 1.0),
        (awaited, {}, 0.5),
        (verl, {}, 1.0),
        (trl, {}, 1.0),
    ],
)
def test_functions_get_what_they_name(function, options, score):
    assert adapt(function, options, ITEM)(SAMPLE) == score


def test_a_chat_reaches_a_trl_function_as_messages():
    def function(completions, prompts):
        return [completions == [[{"role": "assistant", "content": "re"}]] and prompts == [chat]]

    chat = [{"role": "user", "content": "hi"}]
    assert adapt(function, {})(Sample("re", "pr", "an", json.dumps({"prompt": chat}))) == 1.0


@pytest.mark.parametrize(
    ("value", "expected"),
    [(1, 1.0), (True, 1.0), (0.25, 0.25), (np.float32(0.5), 0.5), (np.bool_(True), 1.0), (None, None)],
)
def test_numbers_are_scores_and_none_is_no_score(value, expected):
    assert adapt(lambda response: value, {})(SAMPLE) == expected


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (float("nan"), "returned nan, which is not a finite number; return None for no score"),
        (float("inf"), "returned inf"),
        ("1.0", "returned '1.0', which is a str and not a number"),
        ([1.0], r"returned \[1.0\], which is a list"),
        ({"reward": 1}, "which is a dict"),
    ],
)
def test_anything_else_is_an_error(value, message):
    with pytest.raises(RewardError, match=message):
        adapt(lambda response: value, {})(SAMPLE)


@pytest.mark.parametrize("value", [1.0, [], [1.0, 2.0], "a"])
def test_a_trl_function_returns_a_list_of_one(value):
    with pytest.raises(RewardError, match="returns a list with a score for each"):
        adapt(lambda completions: value, {})(SAMPLE)


@pytest.mark.parametrize(
    ("function", "options", "message"),
    [
        (
            lambda response, wrod: 1,
            {},
            "nothing provides its parameter 'wrod'; there are response, prompt, answer, item, word",
        ),
        (lambda text: 1, {}, "takes text: a reward function has a parameter `response`"),
        (lambda: 1, {}, "takes nothing"),
        (
            lambda response, scale: 1,
            {"scal": 1},
            r"no parameter 'scal' for reward.options.scal - did you mean 'scale'\?",
        ),
        (lambda response, **rest: 1, {"answer": 1}, "reward.options.answer would hide the answer of the sample"),
        (min, {}, "does not tell its parameters"),
    ],
)
def test_a_function_that_does_not_fit_is_refused_at_the_start(function, options, message):
    with pytest.raises(ConfigError, match=message):
        adapt(function, options, ["word"])


def test_a_field_that_an_item_lacks_is_named_at_the_call():
    with pytest.raises(RewardError, match=r"the item has no field 'wrod' - did you mean 'word'\?"):
        adapt(lambda response, wrod: 1, {}, None)(SAMPLE)
