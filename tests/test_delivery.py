"""Who is told of which version, in whatever order they answer; and what is retired."""

from hypothesis import given
from hypothesis import strategies as st

from asyncflow.delivery import Delivery
from asyncflow.execute.messages import Apply, Retire, Switch

ENGINES = ("a", "b")


class Sent:
    def __init__(self):
        self.asked, self.retired = {}, -1

    def __call__(self, replica, command):
        if isinstance(command, Retire):
            assert replica == "trainer-0"
            assert command.version > self.retired
            self.retired = command.version
        else:
            assert replica not in self.asked, f"{replica} was told of another version before it answered"
            self.asked[replica] = command


def delivery():
    sent = Sent()
    return Delivery(ENGINES, "trainer-0", sent), sent


def publish(own, version):
    own.published(version, b"%d" % version)
    own.use(version)


def answer(own, sent, engine, *, applied=True):
    own.answered(engine, sent.asked.pop(engine).version, applied=applied)


def test_one_that_was_slow_skips_what_is_old_by_then():
    own, sent = delivery()
    for version in range(4):
        publish(own, version)
    assert sent.asked == {engine: Apply(0, b"0") for engine in ENGINES}
    answer(own, sent, "a")
    assert sent.asked["a"] == Apply(3, b"3")


def test_one_that_gave_up_is_told_of_the_next_and_does_not_keep_the_last():
    own, sent = delivery()
    publish(own, 1)
    answer(own, sent, "a")
    answer(own, sent, "b", applied=False)
    assert sent.asked == {}
    assert sent.retired == 1
    publish(own, 2)
    assert sent.asked["b"] == Apply(2, b"2")


def test_one_that_gave_up_is_asked_again_where_it_must_not_be_left_behind():
    own, sent = delivery()
    publish(own, 1)
    for engine in ENGINES:
        answer(own, sent, engine, applied=engine == "a")
    own.use(1)
    assert sent.asked == {"b": Apply(1, b"1")}


def test_what_is_wanted_before_it_is_known_where_it_is_is_told_then():
    own, sent = delivery()
    own.use(1)
    assert sent.asked == {}
    own.published(1, b"1")
    assert sent.asked == {engine: Apply(1, b"1") for engine in ENGINES}


def test_what_is_held_back_is_told_when_it_is_used():
    own, sent = delivery()
    publish(own, 1)
    own.published(2, b"2")
    for engine in ENGINES:
        answer(own, sent, engine)
    assert sent.asked == {}
    own.joined("b")
    assert sent.asked == {"b": Apply(1, b"1")}
    own.use(2)
    assert sent.asked["a"] == Apply(2, b"2")


def test_while_a_version_is_held_it_is_the_newest_for_all_also_for_one_that_begins_again():
    own, sent = delivery()
    publish(own, 1)
    for engine in ENGINES:
        answer(own, sent, engine)
    assert own.hold(1) == 1
    for version in (2, 3):
        publish(own, version)
    own.joined("b")
    assert sent.asked == {"b": Apply(1, b"1")}
    answer(own, sent, "b")
    own.release()
    assert sent.asked == {engine: Apply(3, b"3") for engine in ENGINES}


def test_what_was_told_of_before_is_held_if_it_is_newer():
    own, sent = delivery()
    publish(own, 2)
    assert own.hold(1) == 2
    assert sent.asked == {engine: Apply(2, b"2") for engine in ENGINES}


def test_one_that_is_gone_keeps_nobody_waiting_for_its_turn():
    told = []
    own = Delivery(ENGINES, "trainer-0", lambda engine, command: told.append((engine, command)))
    for engine in ENGINES:
        own.staged(engine, 1)
    assert told == [("a", Switch(1))]
    own.left("a")
    assert told == [("a", Switch(1)), ("b", Switch(1))]
    own.staged("a", 1)
    own.answered("b", 1, applied=True)
    assert told[-1] == ("a", Switch(1))
    own.close()


WHAT = ["publish", "applied", "gave up", "joined", "hold", "release"]
STEPS = st.lists(st.tuples(st.sampled_from(WHAT), st.sampled_from(ENGINES)))


@given(STEPS)
def test_everybody_ends_with_the_newest_and_nothing_is_retired_that_is_needed(steps):
    own, sent = delivery()
    version, uses, settled = -1, dict.fromkeys(ENGINES, -1), dict.fromkeys(ENGINES, -1)
    held = None
    for what, engine in [*steps, ("release", "a"), *[("applied", engine) for engine in ENGINES * 3]]:
        if what == "publish":
            version += 1
            publish(own, version)
        elif what == "hold" and held is None:
            held = own.hold(version)
        elif what == "release":
            held = None
            own.release()
        elif what == "hold":
            continue
        elif what == "joined":
            sent.asked.pop(engine, None)
            uses[engine] = settled[engine] = -1
            own.joined(engine)
        elif engine in sent.asked:
            told = sent.asked[engine].version
            assert told >= sent.retired
            assert held is None or told <= held
            settled[engine] = told
            uses[engine] = told if what == "applied" else uses[engine]
            answer(own, sent, engine, applied=what == "applied")
        assert sent.retired <= version
    assert all(uses[engine] == version or settled[engine] == version for engine in ENGINES)
