import subprocess
import sys

import pytest

from asyncflow.algorithms.advantages import ADVANTAGES
from asyncflow.algorithms.options import ALGORITHMS, OPTIONS, reads, resolve, unused
from asyncflow.config.model import Train


def test_every_algorithm_names_an_advantage_that_exists():
    assert all(algorithm.advantage in ADVANTAGES for algorithm in ALGORITHMS.values())


def test_every_option_is_one_of_the_file():
    assert set(Train.model_fields) >= OPTIONS
    assert set(ALGORITHMS) == set(Train.model_fields["algorithm"].annotation.__args__)


def test_defaults_are_those_of_the_file_where_the_algorithm_has_none_of_its_own():
    for name, default in ALGORITHMS["grpo"].defaults.items():
        assert default == Train.model_fields[name].default


@pytest.mark.parametrize(
    ("algorithm", "given", "word"),
    [
        ("rloo", {"std": "biased"}, "only by grpo"),
        ("dr_grpo", {"std": "unbiased"}, "only by grpo"),
        ("grpo", {"kl": "k1"}, "kl_coef is 0"),
        ("grpo", {"aggregate_length": 4}, "only by seq-mean-token-sum-norm"),
        ("dr_grpo", {"aggregate": "token-mean", "aggregate_length": 4}, "only by seq-mean-token-sum-norm"),
    ],
)
def test_an_option_without_effect_is_named(algorithm, given, word):
    (line,) = unused(algorithm, given)
    assert word in line


@pytest.mark.parametrize(
    ("algorithm", "given"),
    [
        ("grpo", {"std": "biased", "lr": 1.0, "clip_low": 0.1}),
        ("grpo", {"kl": "k1", "kl_coef": 0.1}),
        ("dr_grpo", {"aggregate_length": 4}),
        ("rloo", {"aggregate": "seq-mean-token-sum-norm", "aggregate_length": 4}),
    ],
)
def test_options_with_effect_pass(algorithm, given):
    assert unused(algorithm, given) == []


def test_the_reference_is_read_only_with_a_coefficient():
    assert "ref_logprobs" not in reads(resolve("grpo", {}))
    assert "ref_logprobs" in reads(resolve("grpo", {"kl_coef": 0.1}))


def test_options_and_reports_need_no_torch():
    code = "import sys, asyncflow.algorithms.options, asyncflow.algorithms.report; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
