"""What an address of a queue may look like."""

import re

from asyncflow.errors import StorageError

_MAX_PORT = 65535


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
