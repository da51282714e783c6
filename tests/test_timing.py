import time

from asyncflow.timing import WAITS, Timing


def test_all_waits_count_and_the_longest_are_told_one_by_one():
    timing = Timing()
    timing.lease()
    for number in range(WAITS + 4):
        with timing.waiting():
            time.sleep(0.02 if number == 2 else 0)
    timing.end()
    assert len(timing.waits) == WAITS
    assert list(timing.waits) == sorted(timing.waits)
    lengths = [ended - began for began, ended in timing.waits]
    assert max(lengths) >= 0.02, "the longest is among them"
    assert timing.blocked >= sum(lengths) - 1e-9
    assert timing.idle >= 0
    assert timing.busy >= 0
