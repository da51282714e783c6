"""What every way of the weights has in common: a sender beside the trainer, a receiver beside each engine.

The sender makes a version available and returns an offer, a few bytes by which receivers find it: they travel with
the commands of the flow. The manifest and the data lie where the offer says. Nothing on the way is ever unpickled.

Versions only grow. A sender keeps what it was not told to retire, but never more than so many versions: a receiver
that stands still costs bounded memory. What is taken from under a receiver is noticed by it, and never read half.
"""

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, Self

import msgspec

from asyncflow.errors import WeightsError
from asyncflow.types import Version
from asyncflow.weights.manifest import Manifest, TensorInfo

if TYPE_CHECKING:
    import torch


class Offer(msgspec.Struct, frozen=True):
    """Where a version is; each channel adds what its receivers need."""

    version: Version
    digest: str
    """Checksum of the manifest."""

    def encode(self) -> bytes:
        """Return it as MessagePack."""
        return msgspec.msgpack.encode(self)

    @classmethod
    def decode(cls, data: bytes) -> Self:
        """Read an offer of this channel; WeightsError for anything else."""
        try:
            return msgspec.msgpack.decode(data, type=cls)
        except msgspec.MsgspecError as error:
            raise WeightsError(f"this is not an offer of weights over this channel: {error}") from error


@dataclass(frozen=True, slots=True)
class Arrived:
    """What a receiver got of a version: those tensors that differ from the ones it held."""

    manifest: Manifest
    tensors: "Mapping[str, torch.Tensor]"


class Sender(Protocol):
    """Publishes versions; safe from many threads."""

    def publish(self, version: Version, tensors: "Iterable[tuple[str, torch.Tensor]]") -> bytes:
        """Make a version available and return its offer; nobody changes the tensors from then on.

        A version at or below the last one is refused (WeightsError).
        """

    def retire(self, version: Version) -> None:
        """Let go of what is older than this version: every receiver has it or has given up. Idempotent."""

    def close(self) -> None:
        """Let go of everything, receivers at work included; idempotent."""


class Receiver(Protocol):
    """Loads versions, one at a time."""

    def load(self, offer: bytes, held: Mapping[str, TensorInfo], deadline: float) -> AbstractContextManager[Arrived]:
        """Enter with the verified tensors of a version, but for those that are held as the manifest has them.

        They are good until the end of the context: their memory is used again. WeightsError, before anything is
        yielded, if the version is gone or damaged, or has not arrived by the deadline (`time.monotonic`).
        """

    def close(self) -> None:
        """End a load that is under way in another thread, as soon as it can be; idempotent."""
