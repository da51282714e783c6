"""Who may fetch, and that one who does not read, or says nonsense, costs nobody else anything."""

import struct
import threading
import time

import msgspec
import pytest
import torch

from asyncflow.errors import WeightsError
from asyncflow.weights.door import MOST, knock
from asyncflow.weights.tcp import TcpOffer, TcpReceiver, TcpSender

PATIENCE = 60.0
LARGE = 64 << 20


@pytest.fixture
def sender():
    own = TcpSender("127.0.0.1", keep=3, timeout=1.0)
    yield own
    own.close()


def check(sender, version):
    """Somebody else gets a version as ever."""
    offer = sender.publish(version, [("w", torch.full((5,), version))])
    with TcpReceiver().load(offer, {}, time.monotonic() + PATIENCE) as arrived:
        assert arrived.tensors["w"].eq(version).all()


def call(offer, version):
    """Ask for a version, and return the connection with what was answered."""
    found = TcpOffer.decode(offer)
    wire = knock(found.host, found.port, found.token, time.monotonic() + PATIENCE)
    wire.send(struct.pack("<q", version))
    return wire, wire.hear()


def ended():
    """Wait until the sender has nobody left to serve."""
    serving = [thread for thread in threading.enumerate() if thread.name == "asyncflow-receiver"]
    for thread in serving:
        thread.join(PATIENCE)
    return not any(thread.is_alive() for thread in serving)


def test_who_does_not_know_the_token_gets_nothing(sender):
    offer = TcpOffer.decode(sender.publish(1, [("w", torch.zeros(5))]))
    other = msgspec.structs.replace(offer, token="0" * len(offer.token))
    with pytest.raises(WeightsError, match="version 1 did not arrive"):
        TcpReceiver().load(other.encode(), {}, time.monotonic() + PATIENCE).__enter__()
    check(sender, 2)


def test_one_who_does_not_read_is_left_and_holds_up_nobody(sender):
    offer = sender.publish(1, [("w", torch.zeros(LARGE, dtype=torch.uint8))])
    wire, manifest = call(offer, 1)
    assert manifest
    wire.say(msgspec.msgpack.encode([0]))
    for version in (2, 3, 4, 5):
        check(sender, version)
    assert ended()
    wire.close()


@pytest.mark.parametrize("said", [b"nonsense", msgspec.msgpack.encode([1]), msgspec.msgpack.encode([-1, 0])])
def test_a_request_for_what_there_is_not_ends_that_connection_alone(sender, said):
    wire, _ = call(sender.publish(1, [("w", torch.zeros(5))]), 1)
    wire.say(said)
    assert ended()
    wire.close()
    check(sender, 2)


def test_a_message_that_is_too_long_is_not_read(sender):
    wire, _ = call(sender.publish(1, [("w", torch.zeros(5))]), 1)
    wire.send(struct.pack("<I", MOST + 1))
    assert ended()
    wire.close()
    check(sender, 2)


def test_a_transfer_that_takes_too_long_is_an_error_within_its_bound(sender):
    offer = sender.publish(1, [("w", torch.zeros(5))])
    with pytest.raises(WeightsError, match=r"version 1 did not arrive from the trainer at .* in time"):
        TcpReceiver().load(offer, {}, time.monotonic()).__enter__()
