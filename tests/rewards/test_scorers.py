import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncflow.rewards.scorers import char_match, exact_match

texts = st.text("ab c", max_size=8)


@pytest.mark.parametrize(("response", "score"), [("cat", 1.0), (" cat\n", 1.0), ("Cat", 0.0), ("", 0.0)])
def test_exact_match(response, score):
    assert exact_match(response, "cat ") == score


@pytest.mark.parametrize(
    ("response", "score"), [("cat", 1.0), (" cat ", 1.0), ("cap", 2 / 3), ("cats", 3 / 4), ("", 0.0), ("tac", 1 / 3)]
)
def test_char_match(response, score):
    assert char_match(response, "cat") == pytest.approx(score)


@settings(deadline=None, max_examples=50)
@given(texts, texts)
def test_char_match_is_1_exactly_for_the_answer(response, answer):
    score = char_match(response, answer)
    assert 0.0 <= score <= 1.0
    assert (score == 1.0) == (exact_match(response, answer) == 1.0)
