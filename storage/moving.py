"""Cells on their way between units and snapshots: what units hold is collected for one, and spread from one.

The files of a snapshot are the same whoever held the cells, so one of any number of units, or of none, is restored
to any other number. The controller reads and writes them, a block at a time.
"""

from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np

from asyncflow.errors import StorageError
from asyncflow.storage import snapshot, wire
from asyncflow.storage.controller import Controller
from asyncflow.storage.keys import Folder
from asyncflow.storage.link import GRACE
from asyncflow.storage.orders import Load, Take, Taken
from asyncflow.storage.placed import PlacedStore
from asyncflow.storage.remote import RemoteLink
from asyncflow.storage.store import TableCut
from asyncflow.storage.unit import Block
from asyncflow.storage.units import Units

_TIMEOUT = 60.0


@contextmanager
def collected(cut: snapshot.Cut, urls: list[str], keys: Folder | None = None) -> Iterator[snapshot.Cut]:
    """Return a cut with the blocks that the units hold, which are fetched as they are asked for."""
    with ExitStack() as links:
        units = [links.enter_context(closing(RemoteLink(url, GRACE, keys))) for url in urls]
        tables = [replace(table, blocks=_blocks(units, cut.lease, table.name)) for table in cut.tables]
        yield replace(cut, tables=tables)


def _blocks(units: list[RemoteLink], cut: int, table: str) -> Iterator[Block]:
    for unit in units:
        number = 0
        while (block := _block(unit, Take(cut, table, number))) is not None:
            yield block
            number += 1


def _block(unit: RemoteLink, request: Take) -> Block | None:
    reply, batch = unit.send(request).result(_TIMEOUT)
    if not isinstance(reply, Taken) or batch is None:
        return None
    block = Block(batch, wire.unpack(reply.rows), wire.unpack(reply.places))
    block.dead = reply.dead
    return block


def restore(controller: Controller, units: Units, folder: Path, keys: Folder | None = None) -> None:
    """Spread a snapshot over the units that have joined, and let the controller go on with it."""
    if not units.urls:
        raise StorageError(f"{folder} cannot be restored: no storage unit has joined")
    files, bases, leases = snapshot.opened(folder)
    with ExitStack() as links:
        reached = {
            number: links.enter_context(closing(RemoteLink(url, GRACE, keys))) for number, url in units.urls.items()
        }

        def made(cut: TableCut) -> PlacedStore:
            store = PlacedStore.spread(cut, leases, units)
            for block in cut.blocks:
                _spread(store, block, reached)
            return store

        stores = [snapshot.table(path, made) for path in files]
    controller.adopt(stores, bases, leases)


def _spread(store: PlacedStore, block: Block, units: dict[int, RemoteLink]) -> None:
    living = store.ledger.alive(block.rows)
    rows, places = block.rows[living], block.places[living]
    at = store.placement.at(rows)
    for number in np.unique(at).tolist():
        mine = at == number
        kept, where = np.unique(places[mine], return_inverse=True)
        batch = block.batch.take(kept)
        stop = store.ledger.stop
        load = Load(store.shape, stop, wire.pack(rows[mine]), wire.pack(where.astype(np.int64)))
        units[number].send(load, batch).result(_TIMEOUT)
        store.placement.grew(number, batch.nbytes)
