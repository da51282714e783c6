"""What holds for every way of the weights, and what becomes of receivers that die, stand still or come late."""

import os
import shutil
import signal
import threading
import time
from contextlib import contextmanager, suppress

import pytest
import torch

from asyncflow.errors import WeightsError
from asyncflow.execute.spawn import fork, pipe
from asyncflow.storage.arena import FOLDER
from asyncflow.weights import clear
from asyncflow.weights.layout import data, info
from asyncflow.weights.shm import ShmOffer
from tests.weights import receivers
from tests.weights.receivers import KEEP, PATIENCE

CHANNELS = ["file", "shm", "tcp", "collective", "inproc"]
BETWEEN_PROCESSES = CHANNELS[:-1]


def tensors(seed=0, rows=3):
    draw = torch.Generator().manual_seed(seed)
    shared = torch.randn(rows, 4, generator=draw)
    return {
        "embed.weight": shared,
        "head.weight": shared,
        "turned": torch.randn(5, 2, generator=draw).T,
        "norm": torch.randn(3, generator=draw).to(torch.bfloat16),
        "count": torch.tensor(2**40 + seed),
        "mask": torch.tensor([True, False]),
        "empty": torch.empty(0, 2),
        "bytes": torch.arange(7, dtype=torch.uint8),
    }


def load(own, offer, held=None, seconds=PATIENCE):
    with own.load(offer, held or {}, time.monotonic() + seconds) as arrived:
        return {name: tensor.clone() for name, tensor in arrived.tensors.items()}


def same(found, sent):
    assert found.keys() == sent.keys()
    for name, tensor in sent.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape), name
        assert torch.equal(found[name], tensor), name


def segments(arena):
    """Files of an arena; others of this machine are none of ours."""
    return [path.name for path in FOLDER.glob(f"asyncflow-{arena}*")]


@pytest.fixture(params=CHANNELS)
def channel(request):
    return request.param


@pytest.fixture
def ends(channel, tmp_path):
    sender, receiver = receivers.sender(channel, tmp_path), receivers.receiver(channel)
    yield sender, receiver
    receiver.close()
    sender.close()
    sender.close()
    assert channel != "shm" or segments(sender._arena.name) == []
    assert list(tmp_path.iterdir()) == []


@contextmanager
def process(channel):
    """Yield a receiver in a process of its own: the process and a connection to it."""
    ours, theirs = pipe()
    child = fork(receivers.serve, (channel, theirs), f"receiver-{channel}", timeout=300)
    theirs.close()
    try:
        yield child, ours
    finally:
        child.kill()
        child.join()
        ours.close()


def ask(connection, message):
    connection.send(message)
    assert connection.poll(PATIENCE), "no answer"
    return connection.recv()


def test_tensors_arrive_bit_for_bit(ends):
    sender, receiver = ends
    for version in (3, 4, 9):
        sent = tensors(version)
        same(load(receiver, sender.publish(version, sent.items())), sent)


def test_a_version_may_have_other_tensors_and_be_larger(ends):
    sender, receiver = ends
    for version, sent in enumerate([tensors(), {"other": torch.ones(3_000_000)}, {"w": torch.zeros(())}]):
        same(load(receiver, sender.publish(version, sent.items())), sent)
        sender.retire(version + 1)


def test_versions_only_grow(ends):
    sender, _ = ends
    sender.publish(3, tensors().items())
    for version in (3, 2):
        with pytest.raises(WeightsError, match=f"version {version} was to be published after version 3"):
            sender.publish(version, tensors().items())


def test_what_is_retired_is_gone_and_the_newest_stays(ends):
    sender, receiver = ends
    offers = [sender.publish(version, tensors(version).items()) for version in (1, 2)]
    sender.retire(2)
    sender.retire(2)
    sender.publish(3, tensors(3).items())  # into the memory of the first, where there is such a thing
    with pytest.raises(WeightsError, match="version 1 is not there"):
        load(receiver, offers[0])
    same(load(receiver, offers[1]), tensors(2))


def test_never_more_than_so_many_versions_are_held(ends):
    sender, receiver = ends
    offers = [sender.publish(version, tensors(version).items()) for version in range(KEEP + 2)]
    for version in range(2):
        with pytest.raises(WeightsError, match=f"version {version} is not there"):
            load(receiver, offers[version])
    for version in range(2, KEEP + 2):
        same(load(receiver, offers[version]), tensors(version))


def test_only_what_differs_is_loaded_where_something_is_held(ends, channel):
    sender, receiver = ends
    first, second = tensors(0), {**tensors(0), "count": torch.tensor(5)}
    sender.publish(1, first.items())
    offer = sender.publish(2, second.items())
    infos = {name: info(tensor.contiguous()) for name, tensor in first.items()}
    found = load(receiver, offer, infos)
    assert torch.equal(found["count"], torch.tensor(5))
    assert set(found) == (set(second) if channel == "collective" else {"count"})


def spoil(channel, sender, sent, folder):
    """Change a byte of the tensor `norm` where it was published."""
    if channel == "file":
        (path,) = folder.iterdir()
        mine, whole = bytes(data(sent["norm"])), path.read_bytes()
        assert whole.count(mine) == 1
        path.write_bytes(whole.replace(mine, bytes([mine[0] ^ 1]) + mine[1:]))
    elif channel in ("tcp", "inproc"):
        sent["norm"][0] += 1
    elif channel == "collective":
        memory = sender._shelf.get(1).memory
        mine = bytes(data(sent["norm"]))
        memory[bytes(memory.numpy()).index(mine)] ^= 1
    else:
        mapping = sender._shelf.get(1).slab.mapping
        at = mapping.find(bytes(data(sent["norm"])))
        mapping[at] ^= 1


def test_damage_is_refused_and_the_tensor_named(ends, channel, tmp_path):
    sender, receiver = ends
    sent = tensors()
    offer = sender.publish(1, sent.items())
    spoil(channel, sender, sent, tmp_path)
    with pytest.raises(WeightsError, match="version 1: tensor norm arrived as"):
        load(receiver, offer)
    same(load(receiver, sender.publish(2, tensors(2).items())), tensors(2))


def test_an_offer_of_another_channel_is_refused(ends, channel, tmp_path):
    _, receiver = ends
    for name in CHANNELS:
        if name != channel:
            other = receivers.sender(name, tmp_path / "other")
            with pytest.raises(WeightsError, match="not an offer"):
                load(receiver, other.publish(1, tensors().items()))
            other.close()
    shutil.rmtree(tmp_path / "other", ignore_errors=True)


def test_one_that_comes_late_gets_the_newest(ends, channel):
    sender, receiver = ends
    for version in (1, 2, 3):
        offer = sender.publish(version, tensors(version).items())
        load(receiver, offer)
        sender.retire(version)
    late = receivers.receiver(channel)
    same(load(late, offer), tensors(3))
    late.close()


def test_a_sender_that_is_closed_ends_who_loads_with_an_error_or_the_whole_version(ends):
    sender, receiver = ends
    sent = tensors(rows=1_000_000)
    offer = sender.publish(1, sent.items())
    closing = threading.Thread(target=sender.close)
    closing.start()
    with suppress(WeightsError):
        same(load(receiver, offer), sent)
    closing.join()
    with pytest.raises(WeightsError, match="version 1"):
        load(receiver, offer)
    with pytest.raises(WeightsError, match="closed"):
        sender.publish(2, sent.items())


@pytest.mark.parametrize("channel", BETWEEN_PROCESSES, indirect=True)
@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_a_receiver_that_dies_or_stands_still_holds_up_nobody(ends, channel, end):
    sender, receiver = ends
    with process(channel) as (child, connection):
        offer = sender.publish(1, tensors(1).items())
        assert ask(connection, offer) == "arrived"  # and it holds on to the version
        os.kill(child.pid, end)
        for version in range(2, KEEP + 4):
            offer = sender.publish(version, tensors(version).items())
            sender.retire(version)
            same(load(receiver, offer), tensors(version))
        if end == signal.SIGSTOP:
            os.kill(child.pid, signal.SIGCONT)
            assert ask(connection, "look") is True, "what it had did not change under it"
            assert ask(connection, offer) == "arrived"


@pytest.mark.parametrize("channel", BETWEEN_PROCESSES, indirect=True)
def test_many_receivers_get_the_same(ends, channel):
    sender, receiver = ends
    with process(channel) as (_, one), process(channel) as (_, two):
        for version in (1, 2, 3):
            sent = tensors(version)
            offer = sender.publish(version, sent.items())
            for connection in (one, two):
                connection.send(offer)
            same(load(receiver, offer), sent)
            for connection in (one, two):
                assert connection.poll(PATIENCE)
                assert connection.recv() == "arrived"
                assert ask(connection, "look") is True


@pytest.mark.parametrize("channel", BETWEEN_PROCESSES, indirect=True)
def test_a_sender_that_is_killed_leaves_an_error_and_then_nothing(channel, tmp_path):
    ours, theirs = pipe()
    child = fork(receivers.publish, (channel, tmp_path / "weights", theirs), "sender", timeout=300)
    theirs.close()
    assert ours.poll(PATIENCE)
    offer, receiver = ours.recv(), receivers.receiver(channel)
    assert load(receiver, offer)["w"].sum() == 1000
    child.kill()
    child.join()
    ours.close()
    assert channel != "shm" or len(segments(ShmOffer.decode(offer).arena)) == 2
    clear(tmp_path)
    with pytest.raises(WeightsError, match="version 1"):
        load(receiver, offer)
    receiver.close()
    assert channel != "shm" or segments(ShmOffer.decode(offer).arena) == []
    assert list(tmp_path.iterdir()) == []
