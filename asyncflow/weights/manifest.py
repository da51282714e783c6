"""What a published version consists of: every tensor with its dtype, shape and checksum.

A receiver verifies all of it before anything is applied, so that a torn file, a renamed tensor or a changed layout
is an error that names the tensor and never a model that is silently wrong. A manifest travels as JSON, beside the
data; whoever announces the version tells its checksum.
"""

from collections.abc import Iterable, Mapping

import msgspec
import xxhash

from asyncflow.errors import WeightsError
from asyncflow.types import Version


class TensorInfo(msgspec.Struct, frozen=True):
    """One tensor as it was published."""

    dtype: str
    shape: tuple[int, ...]
    checksum: str
    """xxh3 of its bytes, 64 bits, in hexadecimal."""


class Manifest(msgspec.Struct, frozen=True):
    """One version of the weights."""

    version: Version
    tensors: dict[str, TensorInfo]

    def encode(self) -> bytes:
        """Return it as JSON."""
        return msgspec.json.encode(self)

    @classmethod
    def decode(cls, data: bytes, digest: str) -> "Manifest":
        """Read what `encode` made; WeightsError unless its checksum is the one that was told."""
        if checksum(data) != digest:
            raise WeightsError(f"the manifest of a version of the weights is damaged: its checksum is not {digest}")
        try:
            return msgspec.json.decode(data, type=cls)
        except msgspec.MsgspecError as error:
            raise WeightsError(f"this is not the manifest of a version of the weights: {error}") from error

    def lacking(self, held: Mapping[str, TensorInfo]) -> list[str]:
        """Return the names of the tensors that differ from those that are held, or are not among them."""
        return [name for name, info in self.tensors.items() if held.get(name) != info]

    def only(self, names: Iterable[str]) -> "Manifest":
        """Return the same version with these tensors alone."""
        return Manifest(self.version, {name: self.tensors[name] for name in names})

    def verify(self, found: Mapping[str, TensorInfo]) -> None:
        """Compare with what arrived; WeightsError names the first tensor that differs."""
        for name in sorted(self.tensors.keys() ^ found.keys()):
            where = "is missing" if name in self.tensors else "was not published"
            raise WeightsError(f"weights of version {self.version}: tensor {name} {where}")
        for name, wanted in self.tensors.items():
            if found[name] != wanted:
                raise WeightsError(
                    f"weights of version {self.version}: tensor {name} arrived as {found[name]}, published as {wanted}"
                )


def checksum(data: bytes | memoryview) -> str:
    """Return the xxh3 of some bytes in hexadecimal."""
    return xxhash.xxh3_64_hexdigest(data)
