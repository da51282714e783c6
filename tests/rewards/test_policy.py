import pytest

from asyncflow.config.model import Reward
from asyncflow.errors import RewardError
from asyncflow.rewards.outcome import UNUSUAL, Outcome
from asyncflow.rewards.policy import Policy
from asyncflow.rewards.signature import Sample


@pytest.mark.parametrize("outcome", UNUSUAL)
@pytest.mark.parametrize(("choice", "reward"), [(None, None), ("drop", None), ("retry", None), ("zero", 0.0)])
def test_a_row_without_a_score_leaves_unless_a_zero_was_asked_for(outcome, choice, reward):
    policy = Policy.of(Reward(fn="exact_match", **({} if choice is None else {f"on_{outcome}": choice})))
    assert policy.reward(Outcome(outcome)) == reward
    assert policy.reward(Outcome("ok", 0.5)) == 0.5


@pytest.mark.parametrize("outcome", UNUSUAL)
def test_an_outcome_that_is_to_end_the_run_does_so_with_the_traceback(outcome):
    policy = Policy.of(Reward(fn="exact_match", **{f"on_{outcome}": "error"}))
    with pytest.raises(RewardError, match=f"(?s)ended with {outcome}: Traceback.*reward.on_{outcome} is `error`"):
        policy.reward(Outcome(outcome, None, "a line", "Traceback of it"))


@pytest.mark.parametrize(
    ("retries", "calls", "last"),
    [(1, ["abc", "ac"], ["error", "ok", "ok"]), (2, ["abc", "ac", "a"], ["ok", "ok", "ok"])],
)
def test_only_rows_that_are_to_be_scored_again_are_and_only_so_often(retries, calls, last):
    fails, seen = {"a": 2, "c": 1}, []

    def score(samples):
        before = "".join(seen)
        seen.append("".join(sample.response for sample in samples))
        tries = [before.count(sample.response) for sample in samples]
        late = [count < fails.get(sample.response, 0) for sample, count in zip(samples, tries, strict=True)]
        return [Outcome("error") if failed else Outcome("ok", 1.0) for failed in late]

    policy = Policy.of(Reward(fn="exact_match", on_error="retry", retries=retries))
    outcomes, retried = policy.score(score, [Sample("a"), Sample("b"), Sample("c")])
    assert seen == calls
    assert [outcome.status for outcome in outcomes] == last
    assert retried == len("".join(calls)) - 3


def test_what_is_dropped_is_not_scored_again():
    policy = Policy.of(Reward(fn="exact_match", on_error="retry"))
    calls = []
    _, retried = policy.score(lambda samples: calls.append(samples) or [Outcome("timeout")], [Sample("a")])
    assert (len(calls), retried) == (1, 0)
