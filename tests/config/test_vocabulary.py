import pytest

from asyncflow.config.model import Model
from asyncflow.config.vocabulary import own_size, size
from asyncflow.data.tokenizer import tokenizer


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"vocab_size": 9}', 9),
        ('{"text_config": {"vocab_size": 8}}', 8),
        ('{"vocab_size": null}', None),
        ("{}", None),
        ("[9]", None),
        ("{", None),
    ],
)
def test_the_size_is_the_one_that_the_folder_says(tmp_path, text, expected):
    (tmp_path / "config.json").write_text(text)
    assert size(tmp_path) == expected
    assert own_size(Model(path=str(tmp_path))) == expected


def test_a_new_model_knows_what_its_config_says_or_its_tokenizer_has(tmp_path):
    characters = Model(config={"model_type": "llama"}, tokenizer="characters", characters="abc")
    assert own_size(characters) == len(tokenizer(characters)) == 6
    assert own_size(Model(config={"vocab_size": 50}, tokenizer="characters")) == 50
    assert own_size(Model(config={}, tokenizer=str(tmp_path))) is None
    assert own_size(Model()) is None
    assert size(tmp_path / "nowhere") is None
