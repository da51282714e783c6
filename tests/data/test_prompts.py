import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncflow.config.model import Data, Model
from asyncflow.data.prompts import prompts
from asyncflow.data.tokenizer import tokenizer
from asyncflow.errors import DataError

TOKENIZER = tokenizer(Model(tokenizer="characters"))
ITEMS = [{"prompt": "one", "answer": 1}, {"prompt": "three", "answer": None}, {"prompt": "two"}]


def made(items, **data):
    return prompts(items, TOKENIZER, Data(source="python", **data), "s")


def test_items_become_columns():
    batch = made(ITEMS).batch
    assert batch["source"].strings() == ["s"] * 3
    assert batch["prompt_id"].array.tolist() == [0, 1, 2]
    assert batch["prompt_text"].strings() == ["one", "three", "two"]
    assert batch["prompt_tokens"][1].tolist() == TOKENIZER("three")["input_ids"]
    assert batch["answer_text"].strings() == ["1", "", ""]
    assert [json.loads(item) for item in batch["item"].strings()] == ITEMS


def test_a_template_that_was_given_needs_its_fields():
    with pytest.raises(DataError, match=r"item 0 of s has no field 'anwser' - did you mean 'answer'\?"):
        made(ITEMS, answer="{anwser}")
    with pytest.raises(DataError, match="item 0 of s has no field 'question'"):
        made(ITEMS, prompt="{question}")


def test_a_long_prompt_is_an_error_or_is_dropped_and_counted():
    with pytest.raises(
        DataError, match=r"item 1 of s: the prompt has 5 tokens, .*max_prompt_tokens 4 \(1 of 3 are longer"
    ):
        made(ITEMS, max_prompt_tokens=4)
    kept = made(ITEMS, max_prompt_tokens=4, on_long="drop")
    assert (kept.batch["prompt_id"].array.tolist(), kept.dropped) == ([0, 2], 1)
    with pytest.raises(DataError, match="3 of 3 are longer"):
        made(ITEMS, max_prompt_tokens=2, on_long="drop")


def test_a_prompt_without_tokens_is_refused():
    with pytest.raises(DataError, match="item 1 of s: the prompt has no tokens"):
        made([{"prompt": "a"}, {"prompt": ""}])


def test_a_chat_goes_through_the_chat_template():
    chat = tokenizer(Model(tokenizer="characters", characters=" abcdefghijklmnopqrstuvwxyz:."))
    messages = [{"role": "user", "content": "hi"}]
    data = Data(source="python")
    with pytest.raises(DataError, match="item 0 of s is a chat, but the tokenizer has no chat template"):
        prompts([{"prompt": messages}], chat, data, "s")
    chat.chat_template = "{% for m in messages %}{{ m.role }}: {{ m.content }}. {% endfor %}assistant:"
    batch = prompts([{"prompt": messages}, {"prompt": "plain"}], chat, data, "s").batch
    assert batch["prompt_text"].strings() == ["user: hi. assistant:", "plain"]
    assert [chat.decode(batch["prompt_tokens"][row]) for row in (0, 1)] == batch["prompt_text"].strings()


@settings(deadline=None, max_examples=30)
@given(st.lists(st.sampled_from("abcdef"), min_size=1, max_size=20), st.integers(0, 6), st.integers(0, 5))
def test_no_held_out_text_stays_in_training(texts, rows, seed):
    whole = made([{"prompt": text} for text in texts])
    if rows >= len(set(texts)):
        with pytest.raises(DataError, match="held-out prompts leave none to train on"):
            whole.split(rows, seed)
        return
    train, held = whole.split(rows, seed)
    kept, out = train.batch["prompt_text"].strings(), held.batch["prompt_text"].strings()
    assert len(out) == len(set(out)) == rows
    assert not set(kept) & set(out)
    assert sorted(kept) == sorted(text for text in texts if text not in out)
    assert whole.split(rows, seed)[1].batch.equals(held.batch)


def test_another_seed_holds_out_others():
    whole = made([{"prompt": f"{number}"} for number in range(100)])
    first, second = (set(whole.split(10, seed)[1].batch["prompt_id"].array.tolist()) for seed in (0, 1))
    assert first != second
    assert len(whole.take([3, 3])) == 2
