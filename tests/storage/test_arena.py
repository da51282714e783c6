"""Memory that is used again must never change under an array that somebody still has."""

import fcntl
import gc
import multiprocessing
import os
import shutil

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncflow.errors import WaitTimeout, WireError
from asyncflow.storage import arena as arena_module
from asyncflow.storage.arena import FOLDER, Arena, Window, Writer, region_of, sweep

MIB = 1 << 20


def files(arena: Arena) -> list[str]:
    return sorted(path.name for path in FOLDER.glob(f"asyncflow-{arena.name}*"))


@pytest.fixture
def arena():
    made = Arena()
    yield made
    made.close()
    assert files(made) == []


@given(st.lists(st.tuples(st.integers(0, 3 * MIB), st.integers(0, 5)), max_size=30))
@settings(max_examples=40, deadline=None)
def test_no_two_living_regions_share_a_byte(steps):
    arena, held = Arena(), []
    writer = arena.writer(1)
    for mark, (nbytes, drop) in enumerate(steps):
        array = writer.take(nbytes).array()
        array[:] = mark
        held.append((array, mark))
        del array
        if drop and len(held) > drop:
            del held[-drop]
        assert all((array == value).all() for array, value in held)
    arena.close()


def test_memory_is_used_again_when_its_last_array_has_gone(arena):
    writer = arena.writer(1)
    array = writer.take(4 * MIB).array()
    view = array[10:20].view(np.int8)
    address = array.__array_interface__["data"][0]
    del array
    second = writer.take(4 * MIB).array()
    assert second.__array_interface__["data"][0] != address
    del second, view
    gc.collect()
    third = writer.take(4 * MIB).array()
    fourth = writer.take(4 * MIB).array()
    assert address in {each.__array_interface__["data"][0] for each in (third, fourth)}
    assert arena.nbytes <= 12 * MIB


def test_a_pin_keeps_what_a_reader_sees(arena):
    arena.share()
    slab = arena.grant(MIB, [], session=7)
    region = arena.region(slab.number, 0, MIB, session=7)
    arena.admit(8)
    arena.pin(slab.number, session=8)
    del region
    arena.grant(MIB, [slab.number], session=7)
    assert arena.grant(MIB, [], session=7).number != slab.number
    arena.unpin({slab.number: 1}, session=8)
    assert arena.grant(MIB, [], session=7).number == slab.number


@pytest.mark.parametrize("role", ["writer", "reader"])
def test_what_a_lost_session_may_still_touch_is_never_used_again(arena, role):
    arena.share()
    slab = arena.grant(MIB, [], session=7)
    if role == "reader":
        arena.admit(8)
        arena.pin(slab.number, session=8)
        arena.grant(MIB, [slab.number], session=7)
    arena.forget(8 if role == "reader" else 7)
    assert f"asyncflow-{arena.name}-{slab.number}" not in files(arena)
    assert slab.number not in {arena.grant(MIB, [], session=9).number for _ in range(3)}


def test_a_session_that_has_left_pins_nothing(arena):
    arena.share()
    arena.admit(8)
    slab = arena.grant(MIB, [], session=7)
    arena.forget(8)
    arena.pin(slab.number, session=8)
    assert arena.grant(MIB, [slab.number], session=7).number == slab.number


def test_a_window_reads_what_was_written_and_says_when_it_is_done(arena):
    window = Window(arena.share())
    region = arena.writer(1).take(MIB)
    region.array()[:] = 5
    array = window.region(region.segment, region.offset, MIB).array()
    assert (array == 5).all()
    assert not array.flags.writeable
    assert window.unpinned() == {}
    part = array[:10]
    del array
    assert window.unpinned() == {}
    del part
    assert window.unpinned() == {region.segment: 1}
    window.close()


@pytest.mark.parametrize(
    ("number", "offset", "nbytes", "session"),
    [
        (1, 0, 5 * MIB, 7),
        (1, -64, 64, 7),
        (1, 1, 64, 7),
        (1, 0, -1, 7),
        (2, 0, 64, 7),
        (1, 0, 64, 8),
        (1, 1 << 62, 64, 7),
    ],
)
def test_a_claim_outside_of_what_was_granted_is_refused(arena, number, offset, nbytes, session):
    arena.grant(MIB, [], session=7)
    with pytest.raises(WireError):
        arena.region(number, offset, nbytes, session)


def test_a_claim_to_leave_or_unpin_what_is_not_ones_own_is_refused(arena):
    slab = arena.grant(MIB, [], session=7)
    for claim in (
        lambda: arena.unpin({slab.number: 1}, 7),
        lambda: arena.unpin({99: 1}, 7),
        lambda: arena.grant(MIB, [slab.number], 8),
    ):
        with pytest.raises(WireError):
            claim()


def test_where_memory_is_short_there_is_no_region(arena, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    arena.share()
    monkeypatch.setattr(os, "posix_fallocate", full)
    assert arena.writer(1).take(MIB) is None
    assert files(arena) == [f"asyncflow-{arena.name}"]


def _die_with_an_arena(connection) -> None:
    arena = Arena()
    connection.send(arena.share())
    arena.writer(1).take(MIB)
    connection.send(len(files(arena)))
    os.kill(os.getpid(), 9)


def test_files_of_a_killed_owner_are_swept_and_those_of_a_living_one_are_not(arena):
    arena.share()
    arena.writer(1).take(MIB)
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    process = multiprocessing.get_context("spawn").Process(target=_die_with_an_arena, args=(theirs,))
    process.start()
    name, made = ours.recv(), ours.recv()
    process.join()
    assert made == 2
    assert len(list(FOLDER.glob(f"asyncflow-{name}*"))) == 2
    sweep()
    assert list(FOLDER.glob(f"asyncflow-{name}*")) == []
    assert len(files(arena)) == 2


def test_only_arrays_of_a_region_have_one(arena):
    array = arena.writer(1).take(MIB).array()
    assert region_of(array[3:9].view(np.int8)) is not None
    assert region_of(np.zeros(4)) is None
    assert region_of(array.copy()) is None
    assert arena_module.ALIGN % 64 == 0


def test_nothing_is_cut_from_a_segment_that_was_left_with_a_grant_that_failed(arena):
    told, failing = [], []

    def grant(nbytes, left):
        told.extend(left)
        if failing:
            raise WaitTimeout("no answer")
        return arena.grant(nbytes, [], session=7)

    writer = Writer(grant)
    segments = [writer.take(nbytes).segment for nbytes in (MIB, 4 * MIB)]
    failing.append(True)
    with pytest.raises(WaitTimeout):
        writer.take(4 * MIB)
    assert told == segments[1:]
    failing.clear()
    assert {writer.take(nbytes).segment for nbytes in (0, MIB, 2 * MIB)}.isdisjoint(told)


def test_what_is_small_and_stays_does_not_hold_what_is_large_and_goes(arena):
    writer, small = arena.writer(1), []
    for _ in range(50):
        small.append(writer.take(MIB // 32))
        writer.take(4 * MIB)
    assert arena.used <= 16 * MIB


def test_a_forked_process_keeps_what_it_had_and_cuts_nothing(arena):
    writer = arena.writer(1)
    array = writer.take(MIB).array()
    array[:] = 1
    changed, say = os.pipe()
    child = os.fork()
    if child == 0:
        os.read(changed, 1)
        os._exit(0 if (array == 1).all() and writer.take(MIB) is None else 1)
    array[:] = 2
    os.write(say, b"x")
    assert os.waitpid(child, 0)[1] == 0
    os.close(changed)
    os.close(say)


def test_an_owner_that_is_swept_before_it_has_its_lock_begins_anew(arena, monkeypatch):
    sweeps, flock = [True], fcntl.flock

    def late(descriptor, operation):
        if operation == fcntl.LOCK_EX and sweeps:
            sweeps.pop()
            sweep()
        flock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", late)
    arena.share()
    assert not sweeps
    assert Window.visible(arena.name, *arena.challenge(1))
    sweep()
    assert files(arena) == [f"asyncflow-{arena.name}"]


def test_only_who_sees_what_was_just_written_maps_the_arena(arena, monkeypatch, tmp_path):
    name = arena.share()
    first, second = arena.challenge(1), arena.challenge(2)
    assert Window.visible(name, *first)
    assert Window.visible(name, *second)
    copy = tmp_path / f"asyncflow-{name}"
    shutil.copy(FOLDER / copy.name, copy)
    later = arena.challenge(1)
    assert not Window.visible(name, *first)
    assert Window.visible(name, *later)
    monkeypatch.setattr(arena_module, "FOLDER", tmp_path)
    assert Window.visible(name, *second)  # the copy is as old as this
    assert not Window.visible(name, *later)


@pytest.mark.parametrize(("at", "proof"), [(0, b""), (0, b"x" * 16), (-1, b"x" * 16), (1 << 70, b"x" * 16), (0, b"x")])
def test_a_proof_that_is_none_is_not_taken(arena, at, proof):
    name = arena.share()
    arena.challenge(1)
    assert not Window.visible(name, at, proof)
    assert not Window.visible("../" + name, at, proof)


def test_without_a_folder_for_shared_memory_there_is_no_region(arena, monkeypatch, tmp_path):
    arena.share()
    with monkeypatch.context() as patch:
        patch.setattr(arena_module, "FOLDER", tmp_path / "none")
        assert arena.writer(1).take(MIB) is None


def test_spare_segments_make_room_for_one_of_another_size(arena, monkeypatch):
    arena.share()
    left = [arena.grant(MIB, [], session=7).number for _ in range(4)]
    monkeypatch.setattr(arena_module, "_available", lambda: (64 if len(files(arena)) == 1 else 8) * MIB)
    assert arena.grant(20 * MIB, left, session=7).size == 20 * MIB


def test_a_window_keeps_one_descriptor_for_a_mapping_and_none_once_it_is_closed(arena):
    window = Window(arena.share())
    slab = arena.grant(MIB, [], session=7)
    before = len(os.listdir("/proc/self/fd"))
    window.slab(slab.number, writable=True)
    assert len(os.listdir("/proc/self/fd")) == before + 1
    window.close()
    assert len(os.listdir("/proc/self/fd")) == before
