"""The `collective` channel: the trainer broadcasts to all engines at once, over a gloo group of torch.distributed.

Each receiver keeps a connection to the trainer, and asks over it for the version that it was told of. Who asks within
a moment gets it in one broadcast; who comes later, or has just begun, gets it in another. So anybody may join and
leave in any order, and nobody waits for one that is gone or stands still longer than that.

    receiver    its name, the version, the group that it is in
    trainer     the group of this broadcast and the place in it, then the manifest; or that the version is gone
    all         the broadcast, in pieces

A group lives as long as the same receivers ask and nothing fails. If a member dies in a broadcast, that broadcast
fails for the others, who ask again and get a group without it. Gloo moves host memory, whichever the device, and
knows no tokens: this channel is for networks that are trusted.
"""

import logging
import socket
import struct
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from importlib import import_module
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from asyncflow.errors import WeightsError
from asyncflow.types import Version
from asyncflow.weights.channel import Arrived, Offer
from asyncflow.weights.door import Door, Wire, family, knock
from asyncflow.weights.layout import describe, on_host, pack, places, views
from asyncflow.weights.manifest import Manifest, TensorInfo, checksum
from asyncflow.weights.shelf import Shelf, gone

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)

GATHER = 1.0
"""Seconds that those who ask wait for the others."""
PIECE = 64 << 20
"""Bytes of one broadcast."""
SHARE = 4
"""Part of the timeout after which a broadcast that stands still fails, so that there is time for another."""


class CollectiveOffer(Offer, frozen=True, tag="collective"):
    """A version that is broadcast to who asks."""

    host: str
    port: int
    token: str
    bound: float
    """Seconds after which a broadcast that stands still fails."""


class Ask(msgspec.Struct, frozen=True):
    """A receiver wants a version."""

    name: str
    version: Version
    group: int
    """The group that it is in; -1 if it is in none."""


class Answer(msgspec.Struct, frozen=True):
    """What becomes of an ask; a group of -1 means that the version is gone."""

    group: int
    rank: int = 0
    size: int = 0
    store: int = 0
    """Port at which members find each other."""


@dataclass(slots=True, eq=False)
class _Member:
    wire: Wire
    ask: Ask | None = None
    awaited: bool = True
    """Whether others wait for it: not for one that has kept them waiting, until it asks again."""


@dataclass(frozen=True, slots=True)
class _Packed:
    manifest: bytes
    memory: "torch.Tensor"


class CollectiveSender:
    """Broadcasts versions to who asks for them."""

    def __init__(self, host: str, *, keep: int, timeout: float, receivers: int) -> None:
        """`receivers` is how many there will be at first."""
        self._host, self._bound = host, max(timeout / SHARE, 0.1)
        self._shelf: Shelf[_Packed] = Shelf(keep)
        self._changed = threading.Condition()
        self._members: list[_Member] = []
        self._missing = receivers
        self._closed = False
        self._group: _Group | None = None
        self._grouped: list[_Member] = []
        self._groups = 0
        self._store: Any = None
        self._store_port = 0
        self._door = Door(host, self._serve)
        self._thread = threading.Thread(target=self._work, name="asyncflow-broadcast", daemon=True)
        self._thread.start()

    def publish(self, version: Version, tensors: "Iterable[tuple[str, torch.Tensor]]") -> bytes:
        """Hold a version, in one piece, and return its offer."""
        import torch

        self._shelf.begin(version)
        owned = on_host(tensors)
        manifest = describe(version, owned)
        memory = torch.empty(places(manifest)[1], dtype=torch.uint8)
        pack(memory, owned, manifest)
        encoded = manifest.encode()
        self._shelf.put(version, _Packed(encoded, memory))
        door = self._door
        return CollectiveOffer(version, checksum(encoded), door.host, door.port, door.token, self._bound).encode()

    def retire(self, version: Version) -> None:
        """Let go of what is older than a version."""
        self._shelf.retire(version)

    def close(self) -> None:
        """Let go of everything and everybody; a broadcast that is under way may go on until its bound."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._door.close()
        self._thread.join(self._bound)
        self._shelf.close()

    def _serve(self, wire: Wire) -> None:
        """Take what one receiver asks for, until it is gone."""
        # Another thread answers meanwhile, and must not wait for a receiver that reads nothing: the kernel sees to it.
        patience = struct.pack("@ll", int(self._bound), int(self._bound % 1 * 1e6))
        wire.connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, patience)
        member = _Member(wire)
        with self._changed:
            self._members.append(member)
            self._missing = max(0, self._missing - 1)
        try:
            while True:
                ask = _read(wire, Ask)
                with self._changed:
                    member.ask, member.awaited = ask, True
                    self._changed.notify_all()
        finally:
            with self._changed:
                self._members.remove(member)
                self._changed.notify_all()

    def _work(self) -> None:
        while asking := self._gather():
            version = max(ask.version for _, ask in asking)
            members = [(member, ask) for member, ask in asking if ask.version == version]
            item = self._shelf.get(version)
            if item is None:
                for member, _ in members:
                    self._answer(member, Answer(-1))
                continue
            try:
                self._broadcast(item, members)
            except (RuntimeError, OSError) as error:
                names = ", ".join(sorted(ask.name for _, ask in members))
                log.warning("the broadcast of version %d to %s failed: %s", version, names, error)
                self._group = None

    def _gather(self) -> list[tuple[_Member, Ask]]:
        """Wait until somebody asks, and a moment for the others; return who asks, nobody when this is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or any(member.ask for member in self._members))
            self._changed.wait_for(lambda: self._closed or self._complete(), GATHER)
            if self._closed:
                return []
            self._missing = 0
            for member in self._members:
                member.awaited = member.ask is not None
            return [(member, member.ask) for member in self._members if member.ask is not None]

    def _complete(self) -> bool:
        return not self._missing and all(member.ask or not member.awaited for member in self._members)

    def _broadcast(self, item: _Packed, asking: list[tuple[_Member, Ask]]) -> None:
        members = [member for member, _ in asking]
        group = self._group
        if group is None or members != self._grouped or any(ask.group != group.number for _, ask in asking):
            group = self._group = None
            self._groups += 1
        number, store = self._groups, self._port()
        for rank, member in enumerate(members, start=1):
            self._answer(member, Answer(number, rank, len(members) + 1, store), item.manifest)
        if group is None:
            group = _Group(self._store, number, 0, len(members) + 1, self._host, self._bound)
            self._group, self._grouped = group, members
        group.broadcast(item.memory)

    def _answer(self, member: _Member, answer: Answer, manifest: bytes = b"") -> None:
        """Answer an ask; who is gone meanwhile is missed by the broadcast itself."""
        with self._changed:
            member.ask = None
        with suppress(OSError):
            member.wire.say(msgspec.msgpack.encode(answer))
            member.wire.say(manifest)

    def _port(self) -> int:
        """Return the port of the store, which is made when it is first needed."""
        if self._store is None:
            # A socket of ours: left to itself the store would listen on every address.
            listening = socket.create_server((self._host, 0), family=family(self._host), backlog=64)
            self._store_port = int(listening.getsockname()[1])
            self._store = _distributed().TCPStore(
                self._host, self._store_port, is_master=True, wait_for_workers=False,
                timeout=timedelta(seconds=self._bound), master_listen_fd=listening.detach(),
            )  # fmt: skip
        return self._store_port


class CollectiveReceiver:
    """Takes part in broadcasts."""

    def __init__(self, name: str) -> None:
        """`name` is what the trainer calls it in its log."""
        self._name = name
        self._lock = threading.Lock()
        self._wire: Wire | None = None
        self._where: tuple[str, int, str] | None = None
        self._group: _Group | None = None
        self._memory: torch.Tensor | None = None
        self._closed = False

    @contextmanager
    def load(self, offer: bytes, held: Mapping[str, TensorInfo], deadline: float) -> Iterator[Arrived]:
        """Ask for a version and take what is broadcast, which is all of it."""
        found = CollectiveOffer.decode(offer)
        try:
            arrived = self._take(found, deadline)
        except WeightsError:
            raise
        except TimeoutError:
            self._leave()
            raise WeightsError(f"the trainer did not broadcast version {found.version} in time") from None
        except (OSError, RuntimeError) as error:
            self._leave()
            raise WeightsError(
                f"the broadcast of version {found.version} failed, its trainer or one of those who took part "
                f"has died or stands still: {error}"
            ) from error
        yield arrived

    def close(self) -> None:
        """End a load that is under way, at the latest when its broadcast stands still for too long."""
        self._closed = True
        self._leave()

    def _take(self, offer: CollectiveOffer, deadline: float) -> Arrived:
        wire = self._connection(offer, deadline)
        group = -1 if self._group is None else self._group.number
        wire.say(msgspec.msgpack.encode(Ask(self._name, offer.version, group)))
        answer, encoded = _read(wire, Answer), wire.hear()
        if answer.group < 0:
            raise gone(offer.version)
        try:
            manifest = Manifest.decode(encoded, offer.digest)
            memory = self._room(places(manifest)[1])
            self._join(offer, answer, wire).broadcast(memory, deadline)
        except WeightsError:
            self._leave()  # the others go on without it
            raise
        return Arrived(manifest, views(memory, manifest))

    def _connection(self, offer: CollectiveOffer, deadline: float) -> Wire:
        """Return the connection to the trainer of an offer."""
        where = offer.host, offer.port, offer.token
        if self._wire is None or where != self._where:
            self._leave()
            self._wire, self._where = knock(*where, deadline), where
            if self._closed:
                self._leave()
                raise ConnectionAbortedError("it was ended here")
        self._wire.deadline = deadline
        return self._wire

    def _join(self, offer: CollectiveOffer, answer: Answer, wire: Wire) -> "_Group":
        """Return the group of a broadcast: the one that it is in, or a new one."""
        if self._group is None or self._group.number != answer.group:
            bound = timedelta(seconds=offer.bound)
            store = _distributed().TCPStore(
                offer.host, answer.store, is_master=False, wait_for_workers=False, timeout=bound
            )
            own = str(wire.connection.getsockname()[0])
            self._group = _Group(store, answer.group, answer.rank, answer.size, own, offer.bound)
        return self._group

    def _room(self, size: int) -> "torch.Tensor":
        import torch

        if self._memory is None or len(self._memory) != size:
            self._memory = torch.empty(size, dtype=torch.uint8)
        return self._memory

    def _leave(self) -> None:
        with self._lock:
            wire, self._wire, self._group = self._wire, None, None
        if wire is not None:
            wire.close()


class _Group:
    """The members of a broadcast; the trainer is the first."""

    def __init__(self, store: Any, number: int, rank: int, size: int, host: str, bound: float) -> None:
        """Return when all of them are there; a RuntimeError if they are not within the bound."""
        distributed, self.number = _distributed(), number
        options = distributed.ProcessGroupGloo._Options()
        options._timeout = timedelta(seconds=bound)
        options._devices = [distributed.ProcessGroupGloo.create_device(hostname=host)]
        # Of its own, not the default group: that is the training engine's.
        self._gloo = distributed.ProcessGroupGloo(distributed.PrefixStore(str(number), store), rank, size, options)

    def broadcast(self, memory: "torch.Tensor", deadline: float = float("inf")) -> None:
        """Send memory from the trainer to all others; a RuntimeError if one of them is gone."""
        options = _distributed().BroadcastOptions()
        options.rootRank = 0
        for at in range(0, len(memory), PIECE):
            if time.monotonic() > deadline:
                raise TimeoutError("timed out")
            self._gloo.broadcast([memory[at : at + PIECE]], options).wait()


def _distributed() -> Any:
    """Return `torch.distributed`, whose stubs lack most of what is used here."""
    return import_module("torch.distributed")


Message = TypeVar("Message")


def _read(wire: Wire, kind: type[Message]) -> Message:
    """Receive a message of a kind; a ConnectionError for anything else."""
    try:
        return msgspec.msgpack.decode(wire.hear(), type=kind)
    except msgspec.MsgspecError as error:
        raise ConnectionError(f"a message that is none: {error}") from error
