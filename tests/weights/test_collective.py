"""A broadcast that loses a member fails for that broadcast alone; who asks again gets it without the lost one."""

import time
from contextlib import contextmanager
from threading import Thread

import msgspec
import pytest
import torch

from asyncflow.weights.collective import Answer, Ask, CollectiveOffer, CollectiveReceiver, CollectiveSender
from asyncflow.weights.door import knock
from asyncflow.weights.subscriber import Subscriber

PATIENCE = 60.0
BOUND = 8.0
"""A quarter of it is how long a broadcast may stand still."""


@pytest.fixture
def sender():
    own = CollectiveSender("127.0.0.1", keep=3, timeout=BOUND, receivers=2)
    yield own
    own.close()


class Engine:
    """What a subscriber hands on, and what it gave up."""

    def __init__(self):
        self.got, self.reasons = {}, []
        self.receiver = CollectiveReceiver("engine")
        self.subscriber = Subscriber(
            self.receiver, self.take, lambda version, why: self.reasons.append(why), timeout=PATIENCE
        )

    def take(self, version, tensors):
        self.got[version] = {name: tensor.clone() for name, tensor in tensors}

    def stage(self, version, offer):
        self.subscriber.hear(version, offer)
        return self.subscriber.stage(version)


@contextmanager
def engine():
    own = Engine()
    yield own
    own.subscriber.close()


def publish(sender, version):
    return sender.publish(version, [("w", torch.full((100_000,), version))])


def leave_half_way(offer, version):
    """Ask as a receiver does, wait to be answered, and be gone before the broadcast."""
    found = CollectiveOffer.decode(offer)
    wire = knock(found.host, found.port, found.token, time.monotonic() + PATIENCE)
    wire.say(msgspec.msgpack.encode(Ask("leaver", version, -1)))
    answer = msgspec.msgpack.decode(wire.hear(), type=Answer)
    wire.close()
    return answer


def test_one_that_leaves_half_way_is_left_out_of_the_next_group(sender, caplog):
    offer = publish(sender, 1)
    with engine() as own:
        staying = Thread(target=own.stage, args=(1, offer))
        staying.start()
        assert leave_half_way(offer, 1).size == 3
        staying.join()
        assert own.got[1]["w"].eq(1).all()
        assert own.reasons == []
        assert "the broadcast of version 1 to engine, leaver failed" in caplog.text


def test_a_group_lasts_as_long_as_its_members(sender):
    with engine() as first, engine() as second:
        for version in (1, 2, 3):
            offer = publish(sender, version)
            other = Thread(target=second.stage, args=(version, offer))
            other.start()
            assert first.stage(version, offer)
            other.join()
        assert sender._groups == 1
    with engine() as third:
        assert third.stage(3, offer)
        assert sender._groups == 2


def test_the_training_engine_keeps_its_own_default_group(sender):
    with engine() as own:
        assert own.stage(1, publish(sender, 1))
        assert not torch.distributed.is_initialized()
