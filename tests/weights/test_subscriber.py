"""A version that cannot be had leaves the engine as it is, within the bound; the next one is tried again."""

import socket
from contextlib import contextmanager

import pytest
import torch

from asyncflow.errors import WeightsError
from asyncflow.weights.inproc import InprocReceiver, InprocSender
from asyncflow.weights.subscriber import ATTEMPTS, Subscriber
from asyncflow.weights.tcp import TcpOffer, TcpReceiver


class Watched(InprocReceiver):
    """Fails the first loads, and tells which tensors were loaded."""

    def __init__(self, failures=0):
        self.failures, self.loaded = failures, []

    @contextmanager
    def load(self, offer, held, deadline):
        self.failures -= 1
        if self.failures >= 0:
            raise WeightsError("the way is blocked")
        with super().load(offer, held, deadline) as arrived:
            self.loaded.append(set(arrived.tensors))
            yield arrived


class Engine:
    def __init__(self, receiver, timeout=60.0, delta=False):
        self.staged, self.gave_up = {}, []
        self.sender = InprocSender(keep=3)
        self.subscriber = Subscriber(
            receiver, self.take, lambda *said: self.gave_up.append(said), timeout=timeout, delta=delta
        )

    def take(self, version, tensors):
        self.staged[version] = {name: tensor.clone() for name, tensor in tensors}

    def publish(self, version, **tensors):
        self.subscriber.hear(version, self.sender.publish(version, tensors.items()))
        return self.subscriber.stage(version)


def test_what_was_heard_of_is_staged():
    own = Engine(Watched())
    assert own.publish(1, w=torch.ones(3))
    assert own.staged[1]["w"].eq(1).all()
    assert own.gave_up == []


@pytest.mark.parametrize("failures", [ATTEMPTS - 1, ATTEMPTS])
def test_a_failure_is_tried_again_and_then_given_up_and_the_next_version_taken(failures):
    own = Engine(Watched(failures))
    assert own.publish(1, w=torch.ones(3)) == (failures < ATTEMPTS)
    assert own.gave_up == ([(1, "the way is blocked")] if failures == ATTEMPTS else [])
    assert own.publish(2, w=torch.ones(3))
    assert 2 in own.staged


def test_a_trainer_that_says_nothing_is_given_up_within_the_bound():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        own = Engine(TcpReceiver(), timeout=0.2)
        own.subscriber.hear(1, TcpOffer(1, "", "127.0.0.1", silent.getsockname()[1], "0" * 32).encode())
        assert not own.subscriber.stage(1)
    ((version, why),) = own.gave_up
    assert version == 1
    assert "in time" in why


def test_what_the_engine_refuses_is_no_fault_of_the_way():
    own = Engine(Watched())

    def refuse(version, tensors):
        raise WeightsError("tensor w is unknown to this model")

    own.subscriber._into = refuse
    with pytest.raises(WeightsError, match="unknown to this model"):
        own.publish(1, w=torch.ones(3))
    assert own.gave_up == []


@pytest.mark.parametrize("delta", [False, True])
def test_with_delta_only_what_differs_is_loaded_and_the_whole_is_staged(delta):
    own = Engine(Watched(), delta=delta)
    frozen, moving = torch.arange(5), torch.zeros(())
    for version in range(3):
        assert own.publish(version, frozen=frozen, moving=moving + version, tied=frozen)
        assert own.staged[version]["frozen"].equal(frozen)
        assert own.staged[version]["moving"] == version
    every = {"frozen", "moving", "tied"}
    assert own.subscriber._receiver.loaded == ([every, {"moving"}, {"moving"}] if delta else [every] * 3)


def test_with_delta_a_version_that_fails_spoils_nothing_that_is_held():
    receiver = Watched()
    own = Engine(receiver, delta=True)
    own.publish(1, a=torch.ones(2), b=torch.ones(2))
    receiver.failures = ATTEMPTS
    own.publish(2, a=torch.ones(2), b=torch.zeros(2))
    own.publish(3, a=torch.ones(2), c=torch.ones(1))
    assert own.staged[3].keys() == {"a", "c"}
    assert own.staged[3]["a"].eq(1).all()
