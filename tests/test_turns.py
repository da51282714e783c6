"""Who applies weights when: one at a time, in the order of asking, and nobody waits for one that is gone or late."""

import threading

from hypothesis import given
from hypothesis import strategies as st

from asyncflow.execute.messages import Switch
from asyncflow.turns import Turns

FOREVER = 3600.0


class Sent:
    def __init__(self):
        self.told, self._changed = [], threading.Condition()

    def __call__(self, engine, command):
        assert isinstance(command, Switch)
        with self._changed:
            self.told.append((engine, command.version))
            self._changed.notify_all()

    def until(self, number):
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.told) >= number, 30)


def test_the_next_has_its_turn_when_the_one_before_has_applied_or_is_gone():
    sent = Sent()
    turns = Turns(sent, FOREVER)
    for engine in "abc":
        turns.ask(engine, 1)
    assert sent.told == [("a", 1)]
    turns.over("b")  # it was not its turn, and will not be
    assert sent.told == [("a", 1)]
    turns.over("a")
    assert sent.told == [("a", 1), ("c", 1)]
    turns.close()


def test_one_that_has_staged_a_newer_version_in_its_turn_applies_that():
    sent = Sent()
    turns = Turns(sent, FOREVER)
    turns.ask("a", 1)
    turns.ask("a", 2)
    assert sent.told == [("a", 1), ("a", 2)]
    turns.close()


def test_one_that_takes_too_long_keeps_nobody_waiting_and_ends_nobody_elses_turn():
    sent = Sent()
    turns = Turns(sent, 0.05)
    turns.ask("a", 1)
    turns.ask("b", 1)
    sent.until(2)
    assert sent.told == [("a", 1), ("b", 1)]
    turns.ask("c", 1)
    turns.over("a")
    turns.over("b")
    sent.until(3)
    assert sent.told[2] == ("c", 1)
    turns.close()


def test_nobody_has_a_turn_after_the_end():
    sent = Sent()
    turns = Turns(sent, FOREVER)
    turns.ask("a", 1)
    turns.ask("b", 1)
    turns.close()
    turns.close()
    turns.over("a")
    assert sent.told == [("a", 1)]


@given(st.lists(st.tuples(st.sampled_from(["ask", "over"]), st.sampled_from("abc"))))
def test_whatever_the_order_one_at_a_time_and_everybody_in_the_end(steps):
    sent = Sent()
    turns = Turns(sent, FOREVER)
    waiting, has = [], None
    for what, engine in [*steps, *[("over", engine) for engine in "abc"] * 3]:
        if what == "ask":
            turns.ask(engine, 1)
            if engine != has and engine not in waiting:
                waiting.append(engine)
        else:
            turns.over(engine)
            waiting = [other for other in waiting if other != engine]
            has = None if engine == has else has
        if has is None and waiting:
            has = waiting.pop(0)
        assert (sent.told[-1][0] if has else None) == has
    turns.close()
