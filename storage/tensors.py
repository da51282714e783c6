"""Columns from torch tensors and back, on the same memory where that can be.

torch is imported only where somebody asks for a tensor; whoever hands one over has it loaded already.
"""

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeGuard

import numpy as np
import numpy.typing as npt

from asyncflow.errors import SchemaError
from asyncflow.storage.schema import RAW
from asyncflow.types import Int64s

if TYPE_CHECKING:
    import torch

Values = npt.NDArray[Any]


def is_tensor(data: object) -> "TypeGuard[torch.Tensor]":
    """Whether this is a torch tensor; nothing is one while torch is not loaded."""
    kind = getattr(sys.modules.get("torch"), "Tensor", None)
    return kind is not None and isinstance(data, kind)


def are_tensors(data: object) -> "TypeGuard[Sequence[torch.Tensor]]":
    """Whether this is a list of tensors."""
    return isinstance(data, list | tuple) and bool(data) and all(map(is_tensor, data))


def logical(tensor: "torch.Tensor") -> str:
    """Return the name of the dtype of a tensor."""
    return str(tensor.dtype).removeprefix("torch.")


def array(tensor: "torch.Tensor") -> Values:
    """Return the values on the same memory if it is the host's; those that numpy has no dtype for as their bits."""
    import torch

    plain, raw = tensor.detach(), RAW.get(logical(tensor))
    if raw is not None:
        plain = plain.view(getattr(torch, raw.name))
    try:
        return plain.numpy(force=True)
    except (TypeError, RuntimeError, NotImplementedError) as error:
        raise SchemaError(f"a tensor of {tensor.dtype} ({tensor.layout}) is no column: {error}") from error


def joined(cells: "Sequence[torch.Tensor]") -> "tuple[torch.Tensor, Int64s]":
    """Return the values of tensors end to end, and how long each was: one transfer, wherever they are."""
    import torch

    if len({(cell.dtype, cell.shape[1:], cell.device) for cell in cells}) != 1 or cells[0].ndim == 0:
        found = sorted({f"{logical(cell)}{list(cell.shape)}" for cell in cells})
        raise SchemaError(f"tensors of one column differ in more than their length: {', '.join(found[:8])}")
    return torch.cat(list(cells)).detach(), np.fromiter((cell.shape[0] for cell in cells), np.int64, len(cells))


def bits(value: float, kind: str) -> Values:
    """Return a number as the bits of a dtype that numpy has not, rounded to the nearest."""
    if str(value) in ("0", "0.0") and kind != "float8_e8m0fnu":
        return np.zeros(1, RAW[kind])
    import torch

    return array(torch.tensor([value], dtype=torch.float32).to(getattr(torch, kind)))


def tensor(values: Values, kind: str) -> "torch.Tensor":
    """Return a tensor on the memory of an array, also where that is read-only."""
    import torch

    found = torch.from_numpy(np.asarray(_Memory(values)))
    return found.view(getattr(torch, kind)) if kind in RAW else found


def nested(values: "torch.Tensor", offsets: "torch.Tensor") -> "torch.Tensor":
    """Return a jagged nested tensor on these."""
    from torch.nested import nested_tensor_from_jagged

    return nested_tensor_from_jagged(values, offsets)


class _Memory:
    """Keeps an array alive under one that calls itself writable: torch knows no other kind, and warns."""

    def __init__(self, values: Values) -> None:
        self._values = values
        shown = values.__array_interface__
        self.__array_interface__ = {**shown, "data": (shown["data"][0], False)}
