"""The trainer does not wait for its weights to be written, but for memory; and a failure is heard of."""

import threading

import pytest

from asyncflow.errors import WeightsError
from asyncflow.weights.publisher import SNAPSHOTS, Publisher


class Slow:
    """Publishes a version when it is let."""

    def __init__(self):
        self.let, self.published, self.closed, self.retired = threading.Event(), [], False, -1
        self.traced = []

    def publish(self, version, tensors):
        assert self.let.wait(60)
        if not tensors:
            raise OSError("no room on the disk")
        self.published.append(version)
        return b"offer"

    def retire(self, version):
        self.retired = version

    def close(self):
        self.closed = True


@pytest.fixture
def made():
    channel, told, failed = Slow(), [], []
    publisher = Publisher(channel, lambda *said: told.append(said), failed.append, 0.1, channel.traced.append)
    yield channel, publisher, told, failed
    channel.let.set()
    publisher.close()


def offered(*versions):
    return [(version, b"offer") for version in versions]


def test_publishing_returns_before_it_is_done_and_keeps_the_order(made):
    channel, publisher, told, failed = made
    for version in range(1, SNAPSHOTS + 1):
        publisher.publish(version, [("w", None)])
    assert told == []
    channel.let.set()
    publisher.close()
    assert channel.published == list(range(1, SNAPSHOTS + 1))
    assert told == offered(*channel.published)
    assert failed == []


def test_memory_is_bounded_and_so_is_the_wait_for_it(made):
    channel, publisher, told, _ = made
    for version in range(SNAPSHOTS):
        publisher.publish(version, [("w", None)])
    with pytest.raises(WeightsError, match=f"version {SNAPSHOTS} cannot be published: {SNAPSHOTS} older ones"):
        publisher.publish(SNAPSHOTS, [("w", None)])
    channel.let.set()
    publisher.close()
    assert told == offered(*range(SNAPSHOTS))


def test_a_failure_is_told_and_the_next_version_goes_on(made):
    channel, publisher, told, failed = made
    publisher.publish(1, [])
    publisher.publish(2, [("w", None)])
    channel.let.set()
    publisher.close()
    assert told == offered(2)
    assert len(failed) == 1
    assert "publishing version 1" in failed[0]
    assert "no room on the disk" in failed[0]


def test_what_is_retired_is_let_go_while_another_is_published(made):
    channel, publisher, _, _ = made
    publisher.publish(2, [("w", None)])
    publisher.retire(1)
    assert channel.retired == 1
    channel.let.set()
    publisher.close()
    assert channel.closed


def test_copying_and_publishing_are_traced_apart_and_what_failed_is_not(made):
    channel, publisher, _, _ = made
    publisher.publish(1, [])
    publisher.publish(2, [("w", None)])
    channel.let.set()
    publisher.close()
    seen = sorted((traced.lane, traced.facts["version"]) for traced in channel.traced)
    assert seen == [("weights: copy", 1), ("weights: copy", 2), ("weights: publish", 2)]
    assert all(traced.started > 0 and traced.seconds >= 0 for traced in channel.traced)
