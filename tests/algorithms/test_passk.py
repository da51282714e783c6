"""Several samples of each prompt: golden numbers by hand, and what holds of every table of them."""

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncflow.algorithms.passk import Samples, at_k, majority_at, mean_at, pass_at


@pytest.mark.parametrize(
    ("k", "n", "correct", "expected"),
    [
        (1, 4, 1, 0.25),
        (2, 4, 1, 0.5),  # 1 - C(3,2)/C(4,2) = 1 - 3/6
        (2, 4, 2, 1 - 1 / 6),
        (3, 5, 1, 0.6),  # 1 - C(4,3)/C(5,3) = 1 - 4/10
        (5, 10, 3, 1 - 21 / 252),
        (4, 4, 0, 0.0),
        (4, 4, 1, 1.0),
        (8, 2, 1, 1.0),  # fewer than k were scored: as for k = 2
        (8, 2, 0, 0.0),
    ],
)
def test_pass_at_k_is_the_unbiased_estimator(k, n, correct, expected):
    assert pass_at(k, n, correct) == pytest.approx(expected, abs=1e-15)


def test_pass_at_k_is_exact_for_many_samples():
    assert pass_at(1, 100_000, 1) == pytest.approx(1e-5, rel=1e-9)
    assert pass_at(5_000, 10_000, 1) == pytest.approx(0.5, rel=1e-12)


def samples(correct: str, answers: str) -> Samples:
    """One letter a sample: 1 is correct; a dot is no answer."""
    return Samples(tuple(mark == "1" for mark in correct), tuple(None if one == "." else one for one in answers))


@pytest.mark.parametrize(
    ("k", "correct", "answers", "expected"),
    [
        (5, "01100", "abbcd", True),
        (5, "10000", "abbcd", False),
        (2, "10", "ab", True),  # of equals the one that came first
        (2, "01", "ab", False),
        (4, "0110", "abba", False),  # two each: a came first
        (3, "10011", "abbaa", False),  # the first three alone
        (5, "10011", "abbaa", True),
        (3, "001", "..b", True),  # what has no answer does not vote
        (2, "11", "..", False),
        (3, "011", "aab", False),  # a is as correct as where it came first
    ],
)
def test_the_majority_is_correct_if_its_first_response_is(k, correct, answers, expected):
    assert majority_at(k, samples(correct, answers)) is expected


def test_mean_at_k_is_that_of_the_first_k():
    assert mean_at(2, (True, False, False)) == 0.5
    assert mean_at(3, (True, False, False)) == pytest.approx(1 / 3)


def test_prompts_count_alike_and_one_without_samples_does_not_count():
    prompts = [samples("1000", "abbb"), samples("1", "a"), samples("", "")]
    assert at_k([1, 4], prompts) == {
        "pass@1": pytest.approx((0.25 + 1) / 2),
        "mean@1": 1.0,
        "maj@1": 1.0,
        "pass@4": 1.0,
        "mean@4": pytest.approx((0.25 + 1) / 2),
        "maj@4": 0.5,
    }
    assert all(map(math.isnan, at_k([1], [samples("", "")]).values()))


MARKS = st.lists(st.booleans(), min_size=1, max_size=12)


@given(MARKS)
def test_pass_at_k_grows_with_k_from_the_mean_to_whether_any_is_correct(correct):
    n = len(correct)
    values = [pass_at(k, n, sum(correct)) for k in range(1, n + 1)]
    assert values[0] == pytest.approx(mean_at(n, correct))
    assert values[-1] == float(any(correct))
    assert all(before <= after + 1e-12 for before, after in itertools.pairwise(values))
    assert pass_at(n + 1, n, sum(correct)) == values[-1]


@given(st.lists(st.booleans(), min_size=1, max_size=7), st.integers(1, 7))
def test_pass_at_k_is_the_share_of_subsets_with_a_correct_one(correct, k):
    subsets = list(itertools.combinations(correct, min(k, len(correct))))
    assert pass_at(k, len(correct), sum(correct)) == pytest.approx(sum(map(any, subsets)) / len(subsets))


@given(st.lists(st.tuples(st.booleans(), st.sampled_from("ab.")), min_size=1, max_size=9), st.integers(1, 9))
def test_a_majority_of_one_answer_is_correct_exactly_if_that_is(rows, k):
    own = samples("".join(str(int(mark)) for mark, _ in rows), "".join(answer for _, answer in rows))
    votes = [answer for answer in own.answers[:k] if answer is not None]
    right = {answer: own.correct[own.answers.index(answer)] for answer in votes}
    clear = [answer for answer in right if 2 * votes.count(answer) > len(votes)]
    if clear:
        assert majority_at(k, own) is right[clear[0]]
    if not votes:
        assert not majority_at(k, own)
