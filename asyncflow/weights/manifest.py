"""What a published version consists of: every tensor with its dtype, shape and checksum.

A receiver verifies all of it before anything is applied, so that a torn file, a renamed tensor or a changed layout
is an error that names the tensor and never a model that is silently wrong.
"""

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

    def verify(self, found: dict[str, TensorInfo]) -> None:
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
