"""Who may take prompts for an engine, and when."""

import threading

import pytest

from asyncflow.backends.base import Capacity
from asyncflow.errors import QueueClosed, WaitTimeout
from asyncflow.stages.room import CROWDED, LOOK, Room


def room_of(limit: int, rows: int, timeout: float) -> Room:
    """Return room in an engine that runs all that it gets."""
    return Room(lambda: Capacity(0, 0, limit), rows, timeout)


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
    room = room_of(limit, 4, 30)
    room.submitted(running)
    lanes = Lanes(room, 5)
    lanes.until(through)
    room.close()
    lanes.until(5)
    lanes.close()
    assert lanes.came == ["through"] * through + ["closed"] * (5 - through)


def test_a_lane_goes_through_as_soon_as_one_response_has_ended():
    room = room_of(8, 4, 30)
    room.submitted(8)
    lanes = Lanes(room, 2)
    room.ended(1)
    lanes.until(1)
    room.close()
    lanes.until(2)
    lanes.close()
    assert lanes.came == ["through", "closed"]


def test_a_lane_that_waits_anew_is_promised_nothing_twice_and_one_that_has_submitted_less_leaves_the_rest():
    room = room_of(8, 8, 30)
    room.wait()
    room.wait()
    lanes = Lanes(room, 1)
    room.submitted(2)
    lanes.until(1)
    lanes.close()
    assert lanes.came == ["through"]


def test_a_wait_in_which_no_response_ends_has_a_bound():
    room = room_of(4, 4, 0.05)
    room.submitted(4)
    with pytest.raises(WaitTimeout, match=r"waited 0\.05 s for one of 4 responses to end"):
        room.wait()


def test_where_nothing_runs_a_lane_waits_however_long_it_takes():
    room = room_of(8, 8, 0.05)
    room.wait()  # promised to this one, which has no prompts yet
    lanes = Lanes(room, 1)
    threading.Event().wait(0.3)
    assert lanes.came == []
    room.close()
    lanes.until(1)
    assert lanes.came == ["closed"]
    lanes.close()


class Engine:
    """An engine that may be sent 64 requests and has memory for fewer; its clock goes on with each response."""

    def __init__(self, fits):
        self.fits, self.under_way, self.now, self.begins = fits, 0, 0.0, True

    @property
    def capacity(self):
        running = min(self.under_way, self.fits)
        return Capacity(running, self.under_way - running, 64, self.begins)

    def serve(self, room, responses, between=LOOK):
        """Let responses end one by one, while a lane brings groups of 4 whenever there is room; most under way."""
        for _ in range(responses):
            while self.under_way < room.limit:
                room.wait()
                room.submitted(4)
                self.under_way += 4
            self.now += between
            self.under_way -= 1
            room.ended(1)


def test_an_engine_that_cannot_run_what_it_may_gets_about_what_it_runs_and_more_again_when_it_can():
    engine = Engine(fits=20)
    room = Room(lambda: engine.capacity, 4, 30, clock=lambda: engine.now)
    engine.serve(room, 100)
    for _ in range(100):
        engine.serve(room, 1)
        assert 20 <= room.limit <= 20 + 64 // 4 + 4 + CROWDED / LOOK + 2
        assert engine.capacity.running >= 19
    engine.fits = 64
    engine.serve(room, 100)
    assert room.limit == 64


def test_an_engine_in_which_few_wait_or_for_a_short_time_gets_all_that_it_may_run():
    engine = Engine(fits=48)  # no more than a quarter waits, beside a group
    room = Room(lambda: engine.capacity, 4, 30, clock=lambda: engine.now)
    engine.serve(room, 200)
    assert room.limit == 64
    engine.fits = 20
    engine.serve(room, int(CROWDED / LOOK))
    engine.fits = 64
    engine.serve(room, 10)
    assert room.limit == 64


def test_an_engine_that_begins_nothing_since_it_drains_gets_all_that_it_may_run_afterwards():
    engine = Engine(fits=64)
    room = Room(lambda: engine.capacity, 4, 30, clock=lambda: engine.now)
    engine.serve(room, 10)
    engine.begins = False
    for running in range(60, 0, -1):
        engine.fits = running
        engine.serve(room, 1)
        assert room.limit == 64


def test_an_engine_is_asked_at_most_a_few_times_a_second_and_never_where_batches_are_fixed():
    asked, now = [], [0.0]

    def capacity():
        asked.append(now[0])
        return Capacity(4, 0, 8)

    room = Room(capacity, 4, 30, clock=lambda: now[0])
    for lanes in (False, True):
        if lanes:
            room.wait()
        room.submitted(80)
        asked.clear()
        for _ in range(80):
            now[0] += LOOK / 8
            room.ended(1)
        assert len(asked) == (10 if lanes else 0)
