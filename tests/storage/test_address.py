"""Addresses: which are of this host alone, and where others find one that means all of it."""

import socket

import pytest

from asyncflow.storage import TransferQueue
from asyncflow.storage.address import local, reachable


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("ipc:///tmp/queue", True),
        ("tcp://127.0.0.1:1", True),
        ("tcp://localhost:*", True),
        ("tcp://[::1]:1", True),
        ("tcp://0.0.0.0:1", False),
        ("tcp://*:1", False),
        ("tcp://[::]:1", False),
        ("tcp://lo:1", False),
        ("tcp://127.0.0.1.example.org:1", False),
        ("tcp://127.0.0.1:1;10.0.0.1:1", False),
    ],
)
def test_only_loopback_and_ipc_are_of_this_host(url, expected):
    assert local(url) is expected


def test_an_address_that_means_all_is_told_as_one_that_others_find():
    assert reachable("tcp://10.1.2.3:5") == "tcp://10.1.2.3:5"
    for url in ("tcp://0.0.0.0:5", "tcp://[::]:5"):
        host, _, port = reachable(url).removeprefix("tcp://").rpartition(":")
        assert port == "5"
        assert socket.getaddrinfo(host.strip("[]"), None)
        assert host not in ("0.0.0.0", "[::]")


def test_ipv6_is_served_where_there_is_any():
    with socket.socket(socket.AF_INET6) as probe:
        try:
            probe.bind(("::1", 0))
        except OSError as error:
            pytest.skip(f"no IPv6 here: {error}")
    with TransferQueue.open() as host, TransferQueue.open(host.serve("tcp://[::1]:*"), 30) as client:
        assert client.url.startswith("tcp://[::1]:")
        assert client.status().tables == {}
