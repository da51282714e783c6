"""The `file` channel: each version a safetensors file in a folder that trainer and engines share.

A version is published by renaming a finished file, so a reader sees it whole or not at all. Versions only grow.
`retire` deletes a version once the flow knows that every engine has it or has given up; no reader deletes anything.
Cost: one write and one read of the weights for each version.
"""

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from asyncflow.errors import WeightsError
from asyncflow.types import Version
from asyncflow.weights.manifest import Manifest, TensorInfo, checksum

if TYPE_CHECKING:
    import torch


class FileChannel:
    """Publishes and loads versions in one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._last: Version = -1

    def publish(self, version: Version, tensors: Iterable[tuple[str, "torch.Tensor"]]) -> Manifest:
        """Write a version; one at or below the last published is refused (WeightsError)."""
        from safetensors.torch import save_file

        if version <= self._last:
            raise WeightsError(f"version {version} was to be published after version {self._last}: versions only grow")
        self.folder.mkdir(parents=True, exist_ok=True)
        # Tied tensors share memory and a file cannot say so: each name gets bytes of its own.
        owned = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors}
        manifest = Manifest(version, {name: info(tensor) for name, tensor in owned.items()})
        partial = self._path(version).with_suffix(f".{os.getpid()}.partial")
        save_file(owned, partial, metadata={"manifest": msgspec.json.encode(manifest).decode()})
        partial.replace(self._path(version))
        self._last = version
        return manifest

    def load(self, version: Version) -> Iterator[tuple[str, "torch.Tensor"]]:
        """Yield the tensors of a version after all of them were verified (WeightsError)."""
        from safetensors import SafetensorError, safe_open

        path = self._path(version)
        try:
            with safe_open(path, framework="pt") as file:
                manifest = msgspec.json.decode((file.metadata() or {}).get("manifest", ""), type=Manifest)
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except FileNotFoundError:
            raise WeightsError(f"version {version} is not published in {self.folder}") from None
        except (SafetensorError, msgspec.DecodeError) as error:
            raise WeightsError(f"{path} is damaged or not a version of the weights: {error}") from error
        manifest.verify({name: info(tensor) for name, tensor in tensors.items()})
        yield from tensors.items()

    def retire(self, version: Version) -> None:
        """Delete a version that nobody needs any more; idempotent."""
        self._path(version).unlink(missing_ok=True)

    def _path(self, version: Version) -> Path:
        return self.folder / f"version-{version:08d}.safetensors"


def info(tensor: "torch.Tensor") -> TensorInfo:
    """Describe a contiguous tensor on the CPU."""
    import torch

    data = tensor.view(-1).view(torch.uint8).numpy().data if tensor.numel() else b""
    return TensorInfo(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), checksum(data))
