"""Who may take prompts for an engine, and when."""

import threading

import pytest

from asyncflow.errors import QueueClosed, WaitTimeout
from asyncflow.stages.room import Room


class Lanes:
    """Threads that each go through once, and stay; tells what became of them, in that order."""

    def __init__(self, room, count):
        self.came, self._changed, self._over = [], threading.Condition(), threading.Event()
        self._threads = [threading.Thread(target=self._lane, args=(room,), daemon=True) for _ in range(count)]
        for thread in self._threads:
            thread.start()

    def _lane(self, room):
        try:
            room.wait()
            end = "through"
        except QueueClosed:
            end = "closed"
        with self._changed:
            self.came.append(end)
            self._changed.notify_all()
        self._over.wait(30)

    def until(self, number):
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.came) >= number, 30)

    def close(self):
        self._over.set()
        for thread in self._threads:
            thread.join(30)


@pytest.mark.parametrize(("limit", "running", "through"), [(8, 0, 2), (9, 0, 3), (8, 4, 1), (8, 7, 1), (8, 8, 0)])
def test_only_as_many_lanes_go_through_as_there_is_room_for_until_the_stage_ends(limit, running, through):
    room = Room(limit, 4, 30)
    room.submitted(running)
    lanes = Lanes(room, 5)
    lanes.until(through)
    room.close()
    lanes.until(5)
    lanes.close()
    assert lanes.came == ["through"] * through + ["closed"] * (5 - through)


def test_a_lane_goes_through_as_soon_as_one_response_has_ended():
    room = Room(8, 4, 30)
    room.submitted(8)
    lanes = Lanes(room, 2)
    room.ended(1)
    lanes.until(1)
    room.close()
    lanes.until(2)
    lanes.close()
    assert lanes.came == ["through", "closed"]


def test_a_lane_that_waits_anew_is_promised_nothing_twice_and_one_that_has_submitted_less_leaves_the_rest():
    room = Room(8, 8, 30)
    room.wait()
    room.wait()
    lanes = Lanes(room, 1)
    room.submitted(2)
    lanes.until(1)
    lanes.close()
    assert lanes.came == ["through"]


def test_a_wait_in_which_no_response_ends_has_a_bound():
    room = Room(4, 4, 0.05)
    room.submitted(4)
    with pytest.raises(WaitTimeout, match=r"waited 0\.05 s for one of 4 responses to end"):
        room.wait()


def test_where_nothing_runs_a_lane_waits_however_long_it_takes():
    room = Room(8, 8, 0.05)
    room.wait()  # promised to this one, which has no prompts yet
    lanes = Lanes(room, 1)
    threading.Event().wait(0.3)
    assert lanes.came == []
    room.close()
    lanes.until(1)
    assert lanes.came == ["closed"]
    lanes.close()
