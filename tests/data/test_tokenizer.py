import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from asyncflow.config.model import Model
from asyncflow.data.tokenizer import agree, answer_tokens, characters, tokenizer
from asyncflow.errors import ConfigError
from asyncflow.storage.batch import Batch

ALPHABET = Model().characters + "\n\té"
TOKENIZER = tokenizer(Model(tokenizer="characters", characters=ALPHABET))


@settings(deadline=None, max_examples=30)
@given(st.text(ALPHABET, max_size=30))
def test_characters_come_back_exactly(text):
    tokens = TOKENIZER(text)["input_ids"]
    assert len(tokens) == len(text)
    assert TOKENIZER.decode(tokens) == text
    assert TOKENIZER.decode([*tokens, TOKENIZER.eos_token_id], skip_special_tokens=True) == text


def test_specials_come_first_and_are_never_read_from_text():
    assert (TOKENIZER.pad_token_id, TOKENIZER.eos_token_id, TOKENIZER.unk_token_id) == (0, 1, 2)
    assert len(TOKENIZER) == 3 + len(ALPHABET)
    assert TOKENIZER("<eos>")["input_ids"] == [3 + ALPHABET.index(letter) for letter in "<eos>"]
    assert TOKENIZER("aÅ")["input_ids"][1:] == [2]


def test_a_saved_tokenizer_loads_with_the_model_it_belongs_to(tmp_path):
    TOKENIZER.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    for loaded in (AutoTokenizer.from_pretrained(tmp_path), tokenizer(Model(path=str(tmp_path)))):
        text = " a  <eos>\n b. "
        assert loaded(text)["input_ids"] == TOKENIZER(text)["input_ids"]
        assert loaded.decode(loaded(text)["input_ids"]) == text
        assert (loaded.pad_token_id, loaded.eos_token_id) == (0, 1)


def test_the_pad_token_falls_back_to_the_end_of_sequence(tmp_path):
    TOKENIZER.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    del config["pad_token"]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert tokenizer(Model(path=str(tmp_path))).pad_token_id == 1
    del config["eos_token"]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="neither a pad token nor an end-of-sequence token"):
        tokenizer(Model(path=str(tmp_path)))


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (Model(), "a new model needs one"),
        (Model(path="/nowhere/x"), "the folder /nowhere does not exist"),
        (Model(tokenizer="characters", characters="aa"), "each character of the alphabet once"),
    ],
)
def test_an_impossible_tokenizer_is_refused(model, message):
    with pytest.raises(ConfigError, match=message):
        tokenizer(model)


def test_a_folder_without_a_tokenizer_is_named(tmp_path):
    with pytest.raises(ConfigError, match="holds no usable tokenizer"):
        tokenizer(Model(path=str(tmp_path)))


def test_answers_end_with_the_end_of_sequence():
    tokens = answer_tokens(Batch({"answer_text": ["ab", ""]}), TOKENIZER)
    assert [row.tolist() for row in tokens] == [[*TOKENIZER("ab")["input_ids"], 1], [1]]
    assert all(row.dtype == np.int64 for row in tokens)


@pytest.mark.parametrize(
    ("alphabet", "size", "message"),
    [
        ("abc", 6, None),
        ("abcd", 9, None),
        ("ab", 9, None),
        (None, 6, None),
        ("abc", 5, "knows 5 tokens, and the policy 6"),
        (None, 5, "knows 5 tokens, and the policy 6"),
        ("acb", 6, "another vocabulary than the policy: token 4 is 'b' for the policy, and 'c' there"),
        ("abd", 6, "token 5 is 'c' for the policy, and 'd' there"),
        ("bc", 6, "token 3 is 'a' for the policy, and 'b' there"),
    ],
)
def test_another_model_means_the_same_by_each_token_or_is_refused(tmp_path, alphabet, size, message):
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": size}))
    if alphabet is not None:
        characters(alphabet).save_pretrained(tmp_path)
    if message is None:
        agree(characters("abc"), str(tmp_path))
        return
    with pytest.raises(ConfigError, match=message):
        agree(characters("abc"), str(tmp_path))
