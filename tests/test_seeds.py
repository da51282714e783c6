import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from asyncflow.seeds import mix


def test_known_value_of_splitmix64():
    # The first output of SplitMix64 with state 0 is 0xE220A8397B1DCDAF; ours is that, halved.
    assert int(mix(0)) == 0xE220A8397B1DCDAF >> 1


@given(st.lists(st.integers(-(2**62), 2**62), min_size=1, max_size=50), st.integers(0, 2**31 - 1))
def test_arrays_and_single_numbers_agree(keys, seed):
    together = mix(seed, np.array(keys))
    assert together.tolist() == [int(mix(seed, key)) for key in keys]
    assert (together >= 0).all()


def test_neighbours_get_different_seeds():
    seeds = mix(7, np.repeat(np.arange(1000), 8), np.tile(np.arange(8), 1000))
    assert len(np.unique(seeds)) == 8000


def test_the_order_of_the_keys_matters():
    assert int(mix(1, 2)) != int(mix(2, 1))
