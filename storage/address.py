"""What an address of a queue may look like, and who can reach it."""

import re
import socket

from asyncflow.errors import StorageError

LOOPBACK = ("127.0.0.1", "localhost", "[::1]")
_MAX_PORT = 65535
_ELSEWHERE = {"0.0.0.0": (socket.AF_INET, "192.0.2.1"), "[::]": (socket.AF_INET6, "2001:db8::1")}
"""Of each address that means all: an address of no host, which the way out of this one leads to."""


def check_port(url: str, any_port: bool) -> None:
    """Refuse a tcp address without a port that exists: libzmq would take 70000 for 4464."""
    if not url.startswith("tcp://"):
        return
    port = url.rpartition(":")[2]
    if any_port and port in ("*", "0"):
        return
    if not re.fullmatch(r"[0-9]{1,5}", port) or not 1 <= int(port) <= _MAX_PORT:
        free = ", or * for any that is free" if any_port else ""
        raise StorageError(f"{url}: {port!r} is no port; expected a number from 1 to {_MAX_PORT}{free}")


def local(url: str) -> bool:
    """Whether only processes of this host can reach an address."""
    return url.startswith("ipc://") or _host(url) in LOOPBACK


def six(url: str) -> bool:
    """Whether an address is one of IPv6, which a socket must be told."""
    return _host(url).startswith("[")


def reachable(url: str) -> str:
    """Return where others find what is bound to `url`: for all addresses, that of the way out, or this host's name."""
    if _host(url) not in _ELSEWHERE:
        return url
    family, elsewhere = _ELSEWHERE[_host(url)]
    return f"tcp://{_way_out(family, elsewhere)}:{url.rpartition(':')[2]}"


def host(url: str) -> str:
    """Return the host of a tcp address, as a socket takes it."""
    return _host(url).strip("[]")


def _host(url: str) -> str:
    return url.removeprefix("tcp://").rpartition(":")[0]


def _way_out(family: socket.AddressFamily, elsewhere: str) -> str:
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((elsewhere, 9))  # looks the way up and sends nothing
            own: str = probe.getsockname()[0]
    except OSError:
        return socket.gethostname()
    return f"[{own}]" if family == socket.AF_INET6 else own
