from dataclasses import replace

import pytest
import torch

from asyncflow.backends.models import new_model
from asyncflow.errors import ConfigError
from tests.backends.tiny import SPEC, spec


def test_the_seed_decides_the_weights_and_the_global_state_stays():
    torch.manual_seed(5)
    before = torch.get_rng_state()
    first, second = new_model(SPEC).state_dict(), new_model(SPEC).state_dict()
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not torch.equal(first["lm_head.weight"], new_model(spec(seed=4)).state_dict()["lm_head.weight"])


def test_the_end_token_is_written_into_the_config():
    assert new_model(SPEC).config.eos_token_id == 1


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"hiden_size": 8}, ["model.config.hiden_size", "hidden_size"]),
        ({"model_type": "qwen22"}, ["model.config.model_type", "qwen2"]),
        ({"model_type": None}, ["model.config.model_type", "needed"]),
        ({"hidden_size": "wide"}, ["model.config", "hidden_size"]),
    ],
)
def test_a_wrong_config_is_refused_with_the_nearest_name(config, words):
    with pytest.raises(ConfigError) as caught:
        new_model(spec(**config))
    assert all(word in str(caught.value) for word in words)


def test_names_that_transformers_translates_are_known():
    assert new_model(spec(rope_theta=5000.0)).config.rope_parameters["rope_theta"] == 5000.0


def test_a_folder_without_a_model_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"config\.json"):
        new_model(replace(SPEC, path=str(tmp_path)))


def test_a_model_is_read_from_its_folder(tmp_path):
    made = new_model(SPEC)
    made.save_pretrained(tmp_path)
    read = new_model(replace(SPEC, path=str(tmp_path), config=None))
    assert all(torch.equal(tensor, read.state_dict()[name]) for name, tensor in made.state_dict().items())


def test_bfloat16_weights_are_those_of_float32_rounded():
    whole, rounded = new_model(SPEC), new_model(replace(SPEC, dtype="bfloat16"))
    found = rounded.state_dict()
    assert all(torch.equal(t.bfloat16(), found[n]) for n, t in whole.state_dict().items())
    assert torch.equal(rounded.model.rotary_emb.inv_freq, whole.model.rotary_emb.inv_freq)
