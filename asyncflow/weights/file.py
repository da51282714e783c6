"""The `file` channel: each version a safetensors file in a folder that trainer and engines share.

A version is published by renaming a finished file, so a reader sees it whole or not at all. Only the sender deletes,
and who has opened a file may read it to its end. Cost: one write and one read of the weights for each version.
"""

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from asyncflow.errors import WeightsError
from asyncflow.types import Version
from asyncflow.weights.channel import Arrived, Offer
from asyncflow.weights.layout import describe, info, on_host
from asyncflow.weights.manifest import Manifest, TensorInfo, checksum
from asyncflow.weights.shelf import Shelf, gone

if TYPE_CHECKING:
    import torch


class FileOffer(Offer, frozen=True, tag="file"):
    """A version in a file."""

    path: str


class FileSender:
    """Writes versions into one folder."""

    def __init__(self, folder: Path, *, keep: int) -> None:
        self._folder = folder.absolute()
        self._shelf: Shelf[Path] = Shelf(keep, lambda path: path.unlink(missing_ok=True))

    def publish(self, version: Version, tensors: "Iterable[tuple[str, torch.Tensor]]") -> bytes:
        """Write a version and return its offer."""
        from safetensors.torch import save_file

        self._shelf.begin(version)
        self._folder.mkdir(parents=True, exist_ok=True)
        owned = _apart(on_host(tensors))
        manifest = describe(version, owned).encode()
        path = self._folder / f"version-{version:08d}.safetensors"
        partial = path.with_suffix(f".{os.getpid()}.partial")
        save_file(owned, partial, metadata={"manifest": manifest.decode()})
        partial.replace(path)
        self._shelf.put(version, path)
        return FileOffer(version, checksum(manifest), str(path)).encode()

    def retire(self, version: Version) -> None:
        """Delete what is older than a version."""
        self._shelf.retire(version)

    def close(self) -> None:
        """Delete every version."""
        self._shelf.close()


class FileReceiver:
    """Reads versions."""

    @contextmanager
    def load(self, offer: bytes, held: Mapping[str, TensorInfo], deadline: float) -> Iterator[Arrived]:
        """Read those tensors that are not held."""
        from safetensors import SafetensorError, safe_open

        found = FileOffer.decode(offer)
        try:
            with safe_open(found.path, framework="pt") as file:
                manifest = Manifest.decode((file.metadata() or {}).get("manifest", "").encode(), found.digest)
                names = manifest.lacking(held)
                if unknown := manifest.tensors.keys() ^ file.keys():
                    raise WeightsError(f"weights of version {found.version}: tensors of the file differ: {unknown}")
                tensors = {name: file.get_tensor(name) for name in names}
        except FileNotFoundError:
            raise gone(found.version) from None
        except (SafetensorError, OSError) as error:
            raise WeightsError(f"{found.path} is damaged or not a version of the weights: {error}") from error
        manifest.only(names).verify({name: info(tensor) for name, tensor in tensors.items()})
        yield Arrived(manifest, tensors)

    def close(self) -> None:
        """Do nothing: reading a file ends by itself."""


def _apart(tensors: "dict[str, torch.Tensor]") -> "dict[str, torch.Tensor]":
    """Give each tensor bytes of its own: tied ones share memory, and a file cannot say so."""
    seen: set[int] = set()
    for name, tensor in tensors.items():
        place = tensor.untyped_storage().data_ptr()
        if place in seen:
            tensors[name] = tensor.clone()
        seen.add(place)
    return tensors
