import pytest

from asyncflow.errors import RewardError
from asyncflow.rewards.outcome import Outcome
from asyncflow.rewards.troubles import Troubles

OK = Outcome("ok", 1.0)


def error(kind, number):
    return Outcome("error", None, f"{kind}: number {number}", f"Traceback of {kind} {number}")


def test_the_first_of_each_kind_is_logged_with_its_traceback_and_the_last_returned(caplog):
    troubles = Troubles(100)
    assert troubles.note([error("KeyError", 1), OK, error("TypeError", 2), error("KeyError", 3)]).endswith("KeyError 3")
    assert troubles.note([Outcome("timeout", None, "too long"), error("KeyError", 4), OK]).endswith("KeyError 4")
    assert troubles.note([OK]) == ""
    told = [record.getMessage().partition("; ")[2] for record in caplog.records]
    assert told == ["error: Traceback of KeyError 1", "error: Traceback of TypeError 2", "timeout: too long"]


@pytest.mark.parametrize(
    ("outcomes", "broken"),
    [
        ([error("KeyError", 1)], False),
        ([error("KeyError", 1), error("KeyError", 2)], True),
        ([OK, error("KeyError", 1), error("KeyError", 2), error("KeyError", 3)], False),
        ([Outcome("unscored"), Outcome("timeout"), Outcome("unscored"), error("KeyError", 1)], False),
    ],
)
def test_a_function_is_broken_if_nothing_was_scored_and_as_many_errors_came_as_are_enough(outcomes, broken):
    troubles = Troubles(2)
    last = troubles.note(outcomes)
    if not broken:
        troubles.check(last)
        return
    with pytest.raises(RewardError, match=r"not one response could be scored, and 2 ended with an error; .*KeyError 2"):
        troubles.check(last)


def test_each_replaced_worker_is_told_of_once():
    troubles = Troubles(1)
    assert [troubles.fresh(count) for count in (0, 2, 2, 3)] == [0, 2, 0, 1]
