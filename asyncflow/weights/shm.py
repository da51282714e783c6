"""The `shm` channel: trainer and engines of one host share memory that is faulted in once and used again and again.

Each version lies in a slot, a segment of an arena (`asyncflow.storage.arena`): random names, mode 0600, removed by
the owner, or, where that was killed, by the flow or by whoever makes an arena later. A slot holds

    version, length of the manifest     the version says whether it is still what was offered
    manifest, as JSON
    the tensors, one after another

A reader locks the slot's file for as long as it uses views of it, and the kernel unlocks it if the reader dies. The
writer rewrites only a slot that it can lock for itself; one that somebody still reads is let go and replaced. So no
byte changes under a reader, whatever the writer believes of it.
"""

import fcntl
import itertools
import os
import struct
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from asyncflow.errors import WeightsError, WireError
from asyncflow.storage.arena import FOLDER, Arena, Region, Slab, Window, segment_path
from asyncflow.types import Version
from asyncflow.weights.channel import Arrived, Offer
from asyncflow.weights.layout import ALIGN, describe, on_host, places, view, views
from asyncflow.weights.manifest import Manifest, TensorInfo, checksum
from asyncflow.weights.shelf import Shelf, gone

if TYPE_CHECKING:
    import torch

_HEADER = struct.Struct("<qQ")


class ShmOffer(Offer, frozen=True, tag="shm"):
    """A version in a slot."""

    arena: str
    slot: int


@dataclass(slots=True, eq=False)
class _Slot:
    slab: Slab
    session: int
    """Under which the arena knows it."""
    lock: int
    """Descriptor of its file."""
    holds: dict[str, tuple[int, TensorInfo]] = field(default_factory=dict)
    """What lies where in it."""


class ShmSender:
    """Writes versions into slots."""

    def __init__(self, *, keep: int, delta: bool = False) -> None:
        """With `delta`, what a slot holds already is not written again."""
        self._delta = delta
        self._arena = Arena()
        self._sessions = itertools.count()
        self._free: deque[_Slot] = deque()
        self._shelf: Shelf[_Slot] = Shelf(keep, self._free.append)

    def publish(self, version: Version, tensors: "Iterable[tuple[str, torch.Tensor]]") -> bytes:
        """Write a version into a slot that nobody reads and return its offer."""
        self._shelf.begin(version)
        owned = on_host(tensors)
        manifest = describe(version, owned)
        encoded, (_, size) = manifest.encode(), places(manifest)
        slot = self._slot(version, _begin(len(encoded)) + size)
        try:
            self._write(slot, owned, manifest, encoded)
        except BaseException:
            self._abandon(slot)
            raise
        fcntl.flock(slot.lock, fcntl.LOCK_UN)
        self._shelf.put(version, slot)
        return ShmOffer(version, checksum(encoded), self._arena.name, slot.slab.number).encode()

    def retire(self, version: Version) -> None:
        """Use slots of older versions again."""
        self._shelf.retire(version)

    def close(self) -> None:
        """Remove every slot; what is being read stays as it is to its reader."""
        self._shelf.close()
        while self._free:
            self._abandon(self._free.popleft())
        self._arena.close()

    def _slot(self, version: Version, size: int) -> _Slot:
        """Return a slot with so much room, locked for writing."""
        while self._free:
            slot = self._free.popleft()
            with suppress(BlockingIOError):
                if slot.slab.size >= size:
                    fcntl.flock(slot.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    return slot
            self._abandon(slot)
        return self._make(version, size)

    def _make(self, version: Version, size: int) -> _Slot:
        name, session = self._arena.share(), next(self._sessions)
        slab = self._arena.grant(size, [], session)
        if slab is None:
            raise WeightsError(
                f"version {version} needs {size / 1e6:.0f} MB of shared memory, and {FOLDER} has not twice as much: "
                f"give it more, or use `weights.channel: file`"
            )
        slot = _Slot(slab, session, os.open(segment_path(name, slab.number), os.O_RDWR | os.O_CLOEXEC))
        fcntl.flock(slot.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return slot

    def _abandon(self, slot: _Slot) -> None:
        self._arena.forget(slot.session)
        os.close(slot.lock)

    def _write(self, slot: _Slot, tensors: "Mapping[str, torch.Tensor]", manifest: Manifest, encoded: bytes) -> None:
        begin, (begins, _) = _begin(len(encoded)), places(manifest)
        memory = _memory(slot.slab)
        # First: if this fails half-way, no reader takes what is there for the version before.
        slot.slab.mapping[: _HEADER.size] = _HEADER.pack(manifest.version, len(encoded))
        slot.slab.mapping[_HEADER.size : _HEADER.size + len(encoded)] = encoded
        before, slot.holds = slot.holds, {}
        holds = {name: (begin + begins[name], info) for name, info in manifest.tensors.items()}
        for name, (at, info) in holds.items():
            if not self._delta or before.get(name) != (at, info):
                view(memory, at, info).copy_(tensors[name])
        slot.holds = holds


class ShmReceiver:
    """Maps slots and hands out views of them."""

    def __init__(self) -> None:
        self._name = ""
        self._window = Window("")

    @contextmanager
    def load(self, offer: bytes, held: Mapping[str, TensorInfo], deadline: float) -> Iterator[Arrived]:
        """Keep the slot for the time of the context, and yield views of it."""
        found = ShmOffer.decode(offer)
        with _reading(found):
            memory = _memory(self._slab(found))
            version, length = _HEADER.unpack(bytes(memory[: _HEADER.size].numpy()))
            if version != found.version or _begin(length) > len(memory):
                raise gone(found.version)
            encoded = bytes(memory[_HEADER.size : _HEADER.size + length].numpy())
            manifest = Manifest.decode(encoded, found.digest)
            yield Arrived(manifest, views(memory[_begin(length) :], manifest, manifest.lacking(held)))

    def close(self) -> None:
        """Let the mappings go."""
        self._window.close()

    def _slab(self, offer: ShmOffer) -> Slab:
        if offer.arena != self._name:
            self._window.close()
            self._name, self._window = offer.arena, Window(offer.arena)
        try:
            return self._window.slab(offer.slot, writable=False)
        except WireError as error:
            raise gone(offer.version) from error


@contextmanager
def _reading(offer: ShmOffer) -> Iterator[None]:
    """Hold the lock of a slot against its writer."""
    try:
        lock = os.open(segment_path(offer.arena, offer.slot), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except (OSError, WireError) as error:
        raise gone(offer.version) from error
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:  # it is being rewritten
        os.close(lock)
        raise gone(offer.version) from None
    try:
        yield
    finally:
        os.close(lock)


def _begin(manifest: int) -> int:
    """Where the tensors begin behind a manifest of so many bytes."""
    end = _HEADER.size + manifest
    return end + -end % ALIGN


def _memory(slab: Slab) -> "torch.Tensor":
    """Return a segment as bytes; torch knows no memory that is read-only, the kernel does."""
    import torch

    return torch.from_numpy(Region(slab, 0, slab.size, deque(), writable=True).array())
