"""Tensors as bytes and back: one after another in one piece of host memory, without a copy where that can be."""

import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from asyncflow.types import Version
from asyncflow.weights.manifest import Manifest, TensorInfo, checksum

if TYPE_CHECKING:
    import torch

ALIGN = 64


def on_host(tensors: "Iterable[tuple[str, torch.Tensor]]") -> "dict[str, torch.Tensor]":
    """Return tensors as contiguous ones in host memory, copied only where they are not."""
    return {name: tensor.detach().cpu().contiguous() for name, tensor in tensors}


def data(tensor: "torch.Tensor") -> memoryview:
    """Return the bytes of a contiguous tensor in host memory."""
    import torch

    return tensor.view(-1).view(torch.uint8).numpy().data if tensor.numel() else memoryview(b"")


def info(tensor: "torch.Tensor") -> TensorInfo:
    """Describe a contiguous tensor in host memory."""
    return TensorInfo(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), checksum(data(tensor)))


def describe(version: Version, tensors: "Mapping[str, torch.Tensor]") -> Manifest:
    """Return the manifest of these tensors."""
    return Manifest(version, {name: info(tensor) for name, tensor in tensors.items()})


def nbytes(info: TensorInfo) -> int:
    """Bytes of a tensor."""
    import torch

    kind: torch.dtype = getattr(torch, info.dtype)
    return math.prod(info.shape) * kind.itemsize


def places(manifest: Manifest) -> tuple[dict[str, int], int]:
    """Return where each tensor begins if they lie one after another, and how many bytes all of them take."""
    begins, at = {}, 0
    for name, info in manifest.tensors.items():
        begins[name] = at
        at += nbytes(info) + -nbytes(info) % ALIGN
    return begins, at


def view(memory: "torch.Tensor", at: int, info: TensorInfo) -> "torch.Tensor":
    """Return the tensor that begins at a place of some memory, a uint8 tensor, and shares it."""
    import torch

    kind: torch.dtype = getattr(torch, info.dtype)
    if not math.prod(info.shape):
        return torch.empty(info.shape, dtype=kind)
    return memory[at : at + nbytes(info)].view(kind).view(info.shape)


def views(memory: "torch.Tensor", manifest: Manifest, names: Iterable[str] | None = None) -> "dict[str, torch.Tensor]":
    """Return tensors that lie in some memory as `places` says, all of them or some, after they were verified."""
    begins, _ = places(manifest)
    wanted = manifest if names is None else manifest.only(names)
    found = {name: view(memory, begins[name], about) for name, about in wanted.tensors.items()}
    wanted.verify({name: info(tensor) for name, tensor in found.items()})
    return found


def pack(memory: "torch.Tensor", tensors: "Mapping[str, torch.Tensor]", manifest: Manifest) -> None:
    """Write tensors into some memory as `places` says."""
    begins, _ = places(manifest)
    for name, about in manifest.tensors.items():
        view(memory, begins[name], about).copy_(tensors[name])
