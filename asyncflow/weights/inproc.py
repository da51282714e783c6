"""The `inproc` channel: trainer and engine in one process share the snapshot itself, and nothing is copied.

An offer names its sender, and only a receiver of the same process finds that.
"""

import secrets
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

from asyncflow.errors import WeightsError
from asyncflow.types import Version
from asyncflow.weights.channel import Arrived, Offer
from asyncflow.weights.layout import describe, info, on_host
from asyncflow.weights.manifest import Manifest, TensorInfo, checksum
from asyncflow.weights.shelf import Shelf, gone

if TYPE_CHECKING:
    import torch


class InprocOffer(Offer, frozen=True, tag="inproc"):
    """A version in this process."""

    sender: str


class InprocSender:
    """Holds versions for receivers of this process."""

    def __init__(self, *, keep: int) -> None:
        self._name = secrets.token_hex(8)
        self.shelf: Shelf[tuple[bytes, Mapping[str, torch.Tensor]]] = Shelf(keep)
        _SENDERS[self._name] = self

    def publish(self, version: Version, tensors: "Iterable[tuple[str, torch.Tensor]]") -> bytes:
        """Hold a version and return its offer."""
        self.shelf.begin(version)
        owned = on_host(tensors)
        manifest = describe(version, owned).encode()
        self.shelf.put(version, (manifest, owned))
        return InprocOffer(version, checksum(manifest), self._name).encode()

    def retire(self, version: Version) -> None:
        """Let go of what is older than a version."""
        self.shelf.retire(version)

    def close(self) -> None:
        """Let go of everything."""
        self.shelf.close()


class InprocReceiver:
    """Finds what a sender of this process holds."""

    @contextmanager
    def load(self, offer: bytes, held: Mapping[str, TensorInfo], deadline: float) -> Iterator[Arrived]:
        """Return the sender's own tensors, which nobody may change."""
        found = InprocOffer.decode(offer)
        sender = _SENDERS.get(found.sender)
        if sender is None:
            raise WeightsError(f"version {found.version} was published in another process: use another channel")
        item = sender.shelf.get(found.version)
        if item is None:
            raise gone(found.version)
        manifest = Manifest.decode(item[0], found.digest)
        tensors = {name: item[1][name] for name in manifest.lacking(held)}
        manifest.only(tensors).verify({name: info(tensor) for name, tensor in tensors.items()})
        yield Arrived(manifest, tensors)

    def close(self) -> None:
        """Do nothing: there is nothing to wait for."""


_SENDERS: WeakValueDictionary[str, InprocSender] = WeakValueDictionary()
