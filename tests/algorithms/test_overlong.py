import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncflow.algorithms.overlong import overlong


def test_the_penalty_falls_linearly_over_the_buffer():
    found = overlong([0, 60, 80, 85, 90, 100, 250], longest=100, buffer=20)
    assert found.tolist() == [0, 0, 0, -0.25, -0.5, -1, -1]


def test_no_penalty_is_a_positive_zero():
    assert not np.signbit(overlong([0, 80], 100, 20)).any()


def test_the_whole_length_may_be_the_buffer():
    assert overlong([0, 5, 10], 10, 10).tolist() == [0, -0.5, -1]


@given(lengths=st.lists(st.integers(0, 10_000)), longest=st.integers(1, 5000), share=st.floats(0, 1))
def test_a_longer_response_never_has_a_smaller_penalty(lengths, longest, share):
    found = overlong(sorted(lengths), longest, max(1, int(share * longest)))
    assert (np.diff(found) <= 0).all()
    assert ((found >= -1) & (found <= 0)).all()


@pytest.mark.parametrize("buffer", [0, -1, 101])
def test_a_buffer_must_fit_into_the_length(buffer):
    with pytest.raises(ValueError, match=f"buffer {buffer}"):
        overlong([1], 100, buffer)
