import numpy as np
import pytest

from asyncflow.config.model import Data
from asyncflow.data.demonstrations import Demonstrations
from asyncflow.data.prompts import prompts
from asyncflow.data.tokenizer import characters
from asyncflow.errors import DataError

TOKENIZER = characters("abcdefghijklmnopqrstuvwxyzABC=")
ITEMS = [{"word": word, "answer": word[::-1]} for word in ("ab", "cde", "fgh", "ijkl")]
DATA = Data(source="python", prompt="{word}=")


def texts(batch) -> list[str]:
    return [TOKENIZER.decode(row[:-1]) for row in batch["response_tokens"]]


def test_without_templates_the_answers_are_those_of_the_data():
    drawn = Demonstrations(prompts(ITEMS, TOKENIZER, DATA).batch, None, TOKENIZER, 0, shuffle=False).take(4)
    assert texts(drawn) == ["ba", "edc", "hgf", "lkji"]
    assert all(row[-1] == TOKENIZER.eos_token_id for row in drawn["response_tokens"])
    assert drawn["response_mask"].lengths.tolist() == drawn["response_tokens"].lengths.tolist()


def test_templates_are_drawn_at_random_and_the_same_for_the_same_seed():
    batch = prompts(ITEMS, TOKENIZER, DATA).batch
    made = [Demonstrations(batch, ["{word}", "{answer}", "{word!u}"], TOKENIZER, 7) for _ in range(2)]
    first, second = (texts(own.take(400)) for own in made)
    assert first == second
    kinds = (("ab", "cde", "fgh", "ijkl"), ("ba", "edc", "hgf", "lkji"))
    shares = [sum(text in kind for text in first) / 400 for kind in kinds]
    assert all(0.2 < share < 0.45 for share in shares)


def test_draws_do_not_depend_on_how_many_are_taken_at_a_time():
    batch = prompts(ITEMS, TOKENIZER, DATA).batch
    whole = Demonstrations(batch, ["{word}", "{answer}"], TOKENIZER, 3).take(30)
    other = Demonstrations(batch, ["{word}", "{answer}"], TOKENIZER, 3)
    other.take(12)
    np.testing.assert_array_equal(whole["prompt_id"].array[12:], other.take(18)["prompt_id"].array)


def test_an_item_without_an_answer_is_named():
    batch = prompts([{"word": "ab"}], TOKENIZER, DATA).batch
    with pytest.raises(DataError, match="item 0 has no answer to train on"):
        Demonstrations(batch, None, TOKENIZER, 0)
