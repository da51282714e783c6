"""Makes the tables of a journal's folder again: from its newest base, and the logs since.

A base is a snapshot that was complete when it got its name, and takes the place of the logs before it. A log holds
what happened to all tables, in order; making that again leads to the same state, down to what samplers have planned
or drawn. Leases are over then: their holders spoke to a process that is gone.
"""

import logging
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from asyncflow.errors import StorageError
from asyncflow.storage import effect, snapshot, wire
from asyncflow.storage.batch import Batch
from asyncflow.storage.log import Entry, Reader
from asyncflow.storage.schema import Schema
from asyncflow.storage.spill import Spill
from asyncflow.storage.store import Limits, Store

log = logging.getLogger(__name__)

_BASE, _LOG = re.compile(r"base\.(\d+)"), re.compile(r"log\.(\d+)")


class Numbers(Iterator[int]):
    """Counts up, from wherever it is set to."""

    def __init__(self, first: int) -> None:
        self.next = first

    def __next__(self) -> int:
        number, self.next = self.next, self.next + 1
        return number


@dataclass(slots=True)
class Folder:
    """What is in the folder of a journal."""

    path: Path
    bases: list[int] = field(default_factory=list)
    logs: list[int] = field(default_factory=list)

    @classmethod
    def of(cls, path: Path) -> "Folder":
        """Look into a folder."""
        names = [each.name for each in path.iterdir()]
        bases = sorted(int(found[1]) for found in map(_BASE.fullmatch, names) if found)
        logs = sorted(int(found[1]) for found in map(_LOG.fullmatch, names) if found)
        return cls(path, [number for number in bases if snapshot.whole(path / f"base.{number}")], logs)

    def base(self, number: int) -> Path:
        """Return where a base is."""
        return self.path / f"base.{number}"

    def log(self, number: int) -> Path:
        """Return where a log is."""
        return self.path / f"log.{number}"

    def since(self) -> range:
        """Return the logs since the newest base; one that is missing is a StorageError."""
        first = self.bases[-1] if self.bases else 1
        needed = range(first, max([*self.logs, first]) + 1)
        missing = [number for number in needed if number not in self.logs]
        if missing and (self.logs or self.bases):
            raise StorageError(f"{self.log(missing[0])} is missing: bring it back, or begin with another folder")
        return needed


@dataclass(slots=True)
class Recovered:
    """The tables of a folder, the number of its last log, and where that ends."""

    held: snapshot.Held
    number: int
    end: int
    nbytes: int
    """Bytes of all logs since the base."""


def recover(folder: Folder, spill: Spill | None = None) -> Recovered:
    """Return what a folder that has logs holds; a StorageError names the file, and the byte, that is damaged."""
    needed = folder.since()
    held = snapshot.Held([], {}, iter(()))
    if folder.bases:
        held = snapshot.read(folder.base(needed[0]), spill)
    player = Player(held, spill)
    end = nbytes = 0
    for number in needed:
        reader = Reader(folder.log(number))
        for entry in reader:
            _play(player, entry, reader.path)
        end, size = reader.end, os.stat(reader.path).st_size
        nbytes += end
        if reader.torn and number != needed[-1]:
            raise StorageError(f"{reader.path} is damaged at byte {end}: {reader.torn}")
        if reader.torn:
            log.warning("%s: %d bytes from byte %d on are cut off: %s", reader.path, size - end, end, reader.torn)
    return Recovered(player.finish(), needed[-1], end, nbytes)


def _play(player: "Player", entry: Entry, path: Path) -> None:
    try:
        if not player.play(entry.record.table, entry.record.effect, entry.batch):
            log.warning("%s, byte %d: the sampler would choose other rows now: they are kept", path, entry.offset)
    except (StorageError, ValueError, LookupError) as error:
        raise StorageError(
            f"{path}, the record at byte {entry.offset} cannot be made again: {type(error).__name__}: {error}"
        ) from error


class Player:
    """Makes effects again."""

    def __init__(self, held: snapshot.Held, spill: Spill | None = None) -> None:
        self._spill = spill
        # Above every lease of the base, by far; those in the logs name themselves.
        self._ids = Numbers(next(held.leases, 1))
        self._highest = self._ids.next
        self._bases = dict(held.bases)
        self._stores = {store.name: store for store in held.stores}
        for store in held.stores:
            store.ledger.leases = self._ids

    def finish(self) -> snapshot.Held:
        """End all leases, and return what there is."""
        self._recall()
        self._ids.next = self._highest
        return snapshot.Held(list(self._stores.values()), self._bases, self._ids)

    def play(self, table: str, made: effect.Effect, batch: Batch | None) -> bool:
        """Make an effect; return whether a sampler would have made it likewise."""
        match made:
            case effect.Created():
                limits = Limits(made.max_rows, made.max_bytes)
                base = self._bases.get(table, 0)
                self._stores[table] = Store(table, Schema(made.columns), limits, base, self._ids, self._spill)
                return True
            case effect.Ended():
                store = self._stores.pop(table)
                self._bases[table] = store.ledger.stop
                store.clear()
                return True
            case effect.Recalled():
                self._recall()
                return True
        store = self._stores[table]
        alike = (
            self._lease(store, made) if isinstance(made, effect.Leased | effect.Kept) else _change(store, made, batch)
        )
        store.sweep()
        return alike

    def _recall(self) -> None:
        for store in self._stores.values():
            store.ledger.recall()
            store.sweep()

    def _lease(self, store: Store, made: effect.Leased | effect.Kept) -> bool:
        self._highest = max(self._highest, made.lease + 1)
        if isinstance(made, effect.Kept):
            store.ledger.keep(made)
            return True
        self._ids.next = made.lease
        return store.ledger.relet(made)


def _change(store: Store, made: effect.Effect, batch: Batch | None) -> bool:
    ledger = store.ledger
    match made:
        case effect.Admitted() | effect.Written():
            _cells(store, made, batch)
        case effect.Widened():
            store.widen(made.columns)
        case effect.Declared():
            store.declare(made.task, made.spec)
        case effect.Finished():
            ledger.finish(made.lease, 0.0, made.step)
        case effect.Returned():
            ledger.release(made.lease, 0.0, made.counted)
        case effect.Committed():
            ledger.commit(made.task, made.step)
        case effect.Rewound():
            ledger.rewind(made.task, made.step)
        case effect.Reset():
            ledger.reset(made.task)
        case effect.Dropped():
            ledger.drop(wire.unpack(made.rows), made.reason)
        case effect.Sealed():
            ledger.seal()
    return True


def _cells(store: Store, made: effect.Admitted | effect.Written, batch: Batch | None) -> None:
    if batch is None:
        raise StorageError("a record without the cells that it tells of")
    if isinstance(made, effect.Written):
        store.write(wire.unpack(made.rows), batch)
        return
    rows = store.admit(store.intake(batch, made.repeat, made.put_id))
    if not np.array_equal(rows, np.arange(made.first, made.first + len(rows))):
        raise StorageError(f"rows from {rows[0]} where the record has rows from {made.first}")
