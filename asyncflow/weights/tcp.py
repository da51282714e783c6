"""The `tcp` channel: the trainer serves its snapshots, and engines, also of other hosts, fetch them.

    receiver    the token; the version
    sender      the manifest, or nothing if the version is gone
    receiver    the positions of the tensors that it lacks
    sender      their bytes, one after another

Bytes go from the snapshot itself and arrive where they stay, in memory that is used again. Every receiver has a
thread of its own at the sender, and a deadline: one that is slow, stands still or dies holds up nobody.
"""

import logging
import struct
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

import msgspec

from asyncflow.errors import WeightsError
from asyncflow.types import Version
from asyncflow.weights.channel import Arrived, Offer
from asyncflow.weights.door import Door, Wire, knock
from asyncflow.weights.layout import data, describe, nbytes, on_host, places, views
from asyncflow.weights.manifest import Manifest, TensorInfo, checksum
from asyncflow.weights.shelf import Shelf, gone

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)

_VERSION = struct.Struct("<q")


class TcpOffer(Offer, frozen=True, tag="tcp"):
    """A version behind a port."""

    host: str
    port: int
    token: str


class TcpSender:
    """Serves versions to whoever knows the token."""

    def __init__(self, host: str, *, keep: int, timeout: float) -> None:
        """Listen on an address of this host; a receiver has `timeout` seconds for a version."""
        self._timeout = timeout
        self._shelf: Shelf[tuple[bytes, Mapping[str, torch.Tensor]]] = Shelf(keep)
        self._door = Door(host, self._serve)

    def publish(self, version: Version, tensors: "Iterable[tuple[str, torch.Tensor]]") -> bytes:
        """Hold a version and return its offer."""
        self._shelf.begin(version)
        owned = on_host(tensors)
        manifest = describe(version, owned).encode()
        self._shelf.put(version, (manifest, owned))
        door = self._door
        return TcpOffer(version, checksum(manifest), door.host, door.port, door.token).encode()

    def retire(self, version: Version) -> None:
        """Let go of what is older than a version; who fetches it may do so to the end."""
        self._shelf.retire(version)

    def close(self) -> None:
        """Let go of everything and everybody."""
        self._door.close()
        self._shelf.close()

    def _serve(self, wire: Wire) -> None:
        wire.deadline = time.monotonic() + self._timeout
        asked = bytearray(_VERSION.size)
        wire.fill(memoryview(asked))
        item = self._shelf.get(_VERSION.unpack(asked)[0])
        if item is None:
            wire.say(b"")
            return
        manifest, tensors = item
        wire.say(manifest)
        all_of_them = list(tensors.values())
        for number in _numbers(wire.hear(), len(all_of_them)):
            wire.send(data(all_of_them[number]))


class TcpReceiver:
    """Fetches versions."""

    def __init__(self) -> None:
        self._memory: torch.Tensor | None = None
        self._wire: Wire | None = None
        self._lock = threading.Lock()
        self._closed = False

    @contextmanager
    def load(self, offer: bytes, held: Mapping[str, TensorInfo], deadline: float) -> Iterator[Arrived]:
        """Fetch those tensors that are not held."""
        found = TcpOffer.decode(offer)
        where = f"{found.host}:{found.port}"
        try:
            wire = self._enter(knock(found.host, found.port, found.token, deadline))
            try:
                arrived = self._fetch(wire, found, held)
            finally:
                self._leave(wire)
        except TimeoutError:
            raise WeightsError(f"version {found.version} did not arrive from the trainer at {where} in time") from None
        except OSError as error:
            raise WeightsError(
                f"version {found.version} did not arrive from the trainer at {where}: {error}"
            ) from error
        yield arrived

    def close(self) -> None:
        """End a load that is under way."""
        with self._lock:
            self._closed = True
            if self._wire is not None:
                self._wire.close()

    def _fetch(self, wire: Wire, offer: TcpOffer, held: Mapping[str, TensorInfo]) -> Arrived:
        wire.send(_VERSION.pack(offer.version))
        encoded = wire.hear()
        if not encoded:
            raise gone(offer.version)
        manifest = Manifest.decode(encoded, offer.digest)
        names = manifest.lacking(held)
        number = {name: place for place, name in enumerate(manifest.tensors)}
        wire.say(msgspec.msgpack.encode([number[name] for name in names]))
        wanted = manifest.only(names)
        begins, size = places(wanted)
        memory = self._room(size)
        for name, about in wanted.tensors.items():
            wire.fill(memory.numpy().data[begins[name] : begins[name] + nbytes(about)])
        return Arrived(manifest, views(memory, wanted))

    def _room(self, size: int) -> "torch.Tensor":
        """Return memory that was faulted in before, if it is enough."""
        import torch

        if self._memory is None or len(self._memory) < size:
            self._memory = torch.empty(size, dtype=torch.uint8)
        return self._memory

    def _enter(self, wire: Wire) -> Wire:
        with self._lock:
            self._wire = wire
            if self._closed:
                wire.close()
        return wire

    def _leave(self, wire: Wire) -> None:
        with self._lock:
            self._wire = None
        wire.close()


def _numbers(message: bytes, count: int) -> list[int]:
    """Read the positions of tensors; a ConnectionError for anything else."""
    try:
        numbers = msgspec.msgpack.decode(message, type=list[int])
    except msgspec.MsgspecError as error:
        raise ConnectionError(f"a request that is none: {error}") from error
    if len(numbers) > count or not all(0 <= number < count for number in numbers):
        raise ConnectionError(f"a request for tensors {numbers} of {count}")
    return numbers
