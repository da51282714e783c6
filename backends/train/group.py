"""The data-parallel ranks of one training engine, over torch.distributed: this process alone, or several.

Every call is made by all ranks, in the same order. One that waits for a rank that does not come ends with an error
after the timeout that the ranks were given, and at once when that rank's process has ended. A second engine of the
same processes has a group of its own, which it joins with its first call: what the two say does not mix.
"""

from collections.abc import Iterator, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from asyncflow.backends.base import Ranks

BUCKET = 32 << 20
"""Bytes of gradients that are added up in one call."""


class Group:
    """This process among the ranks; alone it exchanges nothing."""

    def __init__(self, ranks: Ranks, device: torch.device) -> None:
        self.rank, self.size, self._device = ranks.rank, ranks.size, device
        self._timeout = timedelta(seconds=ranks.timeout)
        self._joined = ranks.size > 1
        self._first = self._joined and not dist.is_initialized()
        self._own: dist.ProcessGroup | None = None
        if self._first:
            # Gloo for what is on the CPU, beside the library of the accelerator.
            kind = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl", "npu": "cpu:gloo,npu:hccl"}[device.type]
            dist.init_process_group(
                kind,
                init_method=f"file://{ranks.rendezvous}",
                rank=ranks.rank,
                world_size=ranks.size,
                timeout=self._timeout,
            )

    @property
    def _group(self) -> dist.ProcessGroup | None:
        if not self._first and self._own is None:
            self._own = dist.new_group(timeout=self._timeout)
        return self._own

    def exchange(self, data: bytes) -> list[bytes]:
        """Return what every rank gave, in the order of the ranks."""
        if self.size == 1:
            return [data]
        mine = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
        lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        dist.all_gather(lengths, torch.tensor([len(data)]), self._group)
        longest = max(int(length) for length in lengths)
        found = [torch.zeros(longest, dtype=torch.uint8) for _ in range(self.size)]
        dist.all_gather(found, torch.nn.functional.pad(mine, (0, longest - len(data))), self._group)
        return [each[: int(length)].numpy().tobytes() for each, length in zip(found, lengths, strict=True)]

    def largest(self, value: int) -> int:
        """Return the largest of the ranks' values."""
        if self.size == 1:
            return value
        found = torch.tensor([value])
        dist.all_reduce(found, dist.ReduceOp.MAX, self._group)
        return int(found)

    def add_gradients(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        """Add every rank's gradients up, in place; a parameter that has none on any rank keeps none."""
        if self.size == 1:
            return
        there = torch.tensor([p.grad is not None for p in parameters], dtype=torch.uint8)
        dist.all_reduce(there, dist.ReduceOp.MAX, self._group)
        shared = [p for p, has in zip(parameters, there.tolist(), strict=True) if has]
        for bucket in _buckets(shared):
            flat = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).reshape(-1) for p in bucket])
            dist.all_reduce(flat, group=self._group)
            for parameter, part in zip(bucket, torch.split(flat, [p.numel() for p in bucket]), strict=True):
                parameter.grad = part.view_as(parameter).clone()

    def close(self) -> None:
        """Leave the ranks, which ends what others of this process have joined if this was the first; idempotent."""
        if self._joined and dist.is_initialized() and (self._first or self._own is not None):
            dist.destroy_process_group(self._own)
        self._joined = False


def _buckets(parameters: Sequence[torch.nn.Parameter]) -> Iterator[list[torch.nn.Parameter]]:
    """Cut parameters into runs of one dtype and about `BUCKET` bytes."""
    bucket: list[torch.nn.Parameter] = []
    for parameter in parameters:
        held = sum(p.numel() * p.element_size() for p in bucket)
        if bucket and (bucket[0].dtype != parameter.dtype or held >= BUCKET):
            yield bucket
            bucket = []
        bucket.append(parameter)
    if bucket:
        yield bucket
