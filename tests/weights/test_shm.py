"""Slots: used again, never under a reader, private, and gone at the end."""

import time

import pytest
import torch

from asyncflow.errors import WeightsError
from asyncflow.storage.arena import segment_path
from asyncflow.weights.manifest import checksum
from asyncflow.weights.shm import ShmOffer, ShmReceiver, ShmSender


@pytest.fixture
def sender():
    own = ShmSender(keep=3, delta=True)
    yield own
    own.close()


def loading(receiver, offer):
    return receiver.load(offer, {}, time.monotonic() + 60)


def path(offer):
    found = ShmOffer.decode(offer)
    return segment_path(found.arena, found.slot)


def test_two_slots_are_enough_where_engines_keep_up(sender):
    receiver, slots = ShmReceiver(), set()
    for version in range(8):
        offer = sender.publish(version, [("w", torch.full((1000,), version))])
        with loading(receiver, offer) as arrived:
            assert arrived.tensors["w"].eq(version).all()
        sender.retire(version)
        slots.add(ShmOffer.decode(offer).slot)
    assert len(slots) == 2


def test_a_slot_that_is_read_is_let_go_and_never_rewritten(sender):
    first = sender.publish(0, [("w", torch.zeros(1000))])
    with loading(ShmReceiver(), first) as arrived:
        for version in range(1, 8):
            offer = sender.publish(version, [("w", torch.full((1000,), version))])
            sender.retire(version)
            assert path(offer) != path(first)
        assert arrived.tensors["w"].eq(0).all()
        assert not path(first).exists()
    with pytest.raises(WeightsError, match="version 0 is not there"), loading(ShmReceiver(), first):
        pass


def test_a_slot_that_holds_a_newer_version_is_not_taken_for_an_older_one(sender):
    receiver, first = ShmReceiver(), sender.publish(0, [("w", torch.zeros(9))])
    for version in (1, 2):
        sender.publish(version, [("w", torch.zeros(9))])
        sender.retire(version)
    assert path(first).exists()
    with pytest.raises(WeightsError, match="version 0 is not there"), loading(receiver, first):
        pass


def test_with_delta_what_a_slot_holds_is_not_written_again(sender):
    same = torch.arange(4096, dtype=torch.int32)
    for version in range(3):
        offer = sender.publish(version, [("same", same), ("new", torch.tensor(version))])
        sender.retire(version)
        if version == 0:
            mapping = sender._shelf.get(0).slab.mapping
            mapping[mapping.find(same.numpy().tobytes())] ^= 1
    with pytest.raises(WeightsError, match="tensor same arrived"), loading(ShmReceiver(), offer):
        pass


def test_slots_are_for_this_user_alone(sender):
    assert path(sender.publish(0, [("w", torch.zeros(9))])).stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("arena", ["../../etc/passwd", "", "0123456789abcdef"])
def test_an_offer_leads_to_nothing_but_slots(arena):
    offer = ShmOffer(0, checksum(b""), arena, 1).encode()
    with pytest.raises(WeightsError, match="version 0 is not there"), loading(ShmReceiver(), offer):
        pass
