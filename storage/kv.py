"""Rows by key: the seven calls that users of the package `transferqueue` make, on a TransferQueue.

Change `import transfer_queue as tq` to `from asyncflow.storage import kv as tq`. A partition is a table; its fields
are columns of bytes (`fields`), found by name in a second table, and its tags lie in a third, since a cell never
changes and a tag may. A key is found by its 62-bit hash, which is the group of its row.

What differs, and why, is listed in docs/transfer-queue.md: a field that is put again must have the same value,
a read of a field that is not there fails, indexes are never used again, and waiting delays nobody.
"""

import logging
import os
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Literal, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt
import xxhash

from asyncflow.errors import CellConflict, ColumnMissing, RowGone, SchemaError, StorageError, WaitTimeout
from asyncflow.storage import fields as codec
from asyncflow.storage.batch import Batch, Column
from asyncflow.storage.client import Found, Stream, TransferQueue
from asyncflow.storage.fields import Spec
from asyncflow.storage.metadata import BatchMeta, KVBatchMeta, Tag
from asyncflow.storage.schema import IDENTITY, MAX_COLUMNS, Schema
from asyncflow.types import Int64s

__all__ = [
    "BatchMeta", "KVBatchMeta", "close", "get_client", "get_data", "get_meta", "init", "kv_batch_get", "kv_batch_put",
    "kv_clear", "kv_list",
]  # fmt: skip

log = logging.getLogger(__name__)

FETCH_SECONDS = 5.0
"""How long `get_meta` waits for rows, unless the queue polls."""

_SLOTS = MAX_COLUMNS - len(IDENTITY) - 1
_ROWS, _FIELDS, _TAGS = "kv.rows/", "kv.fields/", "kv.tags/"
_KEEPER = "kept"
_TRIES = 16

R = TypeVar("R")


class Partition:
    """A named set of rows with any fields."""

    def __init__(self, queue: TransferQueue, name: str) -> None:
        self.name = name
        slots = {_slot(number): "bytes" for number in range(_SLOTS)}
        self.rows = queue.create_table(_ROWS + name, Schema({"key": "string", **slots}))
        # Rows stay until they are cleared: this task never takes any, so that none is done for all tasks.
        self.rows.task(_KEEPER, reads=("key",))
        self._fields = queue.create_table(_FIELDS + name, Schema({"name": "string", "spec": "bytes"}))
        self._tags = queue.create_table(_TAGS + name, Schema({"tag": "bytes"}))
        self._slots: dict[str, str] = {}
        self.specs: dict[str, Spec] = {}

    # Fields

    def learn(self) -> None:
        """Read which fields there are: the order in which they were first named gives their columns.

        A field may be named by several clients at once; the first spec counts, and rows are never dropped here.
        """
        batch = self._fields.read(self._fields.find().rows, ["name", "spec"])
        slots, specs = dict[str, str](), dict[str, Spec]()
        for name, spec in zip(batch["name"].strings(), batch["spec"], strict=True):
            slots.setdefault(name, _slot(len(slots)))
            if spec:
                specs.setdefault(name, msgspec.msgpack.decode(spec, type=Spec))
        self._slots, self.specs = slots, specs

    def declare(self, wanted: Mapping[str, Spec | None]) -> None:
        """Make fields known; a field that is known with another spec is a SchemaError."""
        if not self._known(wanted):
            self.learn()
        fresh = {name: spec for name, spec in wanted.items() if not self._known({name: spec})}
        if len(self._slots.keys() | fresh.keys()) > _SLOTS:
            raise SchemaError(f"partition {self.name!r} would have more than {_SLOTS} fields")
        if fresh:
            specs = [b"" if spec is None else msgspec.msgpack.encode(spec) for spec in fresh.values()]
            self._fields.put({"name": list(fresh), "spec": Column.of("bytes", specs)})
            self.learn()
        for name, spec in wanted.items():
            if spec is not None and self.specs[name] != spec:
                raise SchemaError(f"field {name!r} of partition {self.name!r} is {self.specs[name]}, not {spec}")

    def _known(self, wanted: Mapping[str, Spec | None]) -> bool:
        return all(name in (self._slots if spec is None else self.specs) for name, spec in wanted.items())

    def slots(self, names: Iterable[str]) -> list[str]:
        """Return the columns of fields that are known."""
        return [self._slots[name] for name in names]

    def common(self, found: Found) -> list[str]:
        """Return the fields that all rows have, sorted."""
        return sorted(name for name in self.specs if found.has(self.slots([name])).all())

    # Keys

    def locate(self, keys: Sequence[str]) -> tuple[Int64s, Found]:
        """Return the places in `keys` of those that there are, and their rows in the same order."""
        hashes = _hashes(keys)
        found = self.rows.find(hashes)
        first, present = _lookup(found.groups, hashes)
        at = first[present]
        return np.flatnonzero(present), Found(found.rows[at], found.groups[at], found.written[at], found.schema)

    def admit(self, keys: Sequence[str]) -> Found:
        """Return the rows of distinct keys, new ones for those that there are not.

        Two clients may admit a key at once: both then see both rows, the first counts and the other is dropped.
        """
        places, found = self.locate(keys)
        if len(places) == len(keys):
            return found
        fresh = np.setdiff1d(np.arange(len(keys)), places)
        names = [keys[place] for place in fresh.tolist()]
        mine = self.rows.put({"key": names, "group_id": _hashes(names)})
        places, found = self.locate(keys)
        self.rows.drop(np.setdiff1d(mine, found.rows), "another client put the same key")
        if len(places) < len(keys):
            raise RowGone(f"partition {self.name!r}: a key was cleared while it was put")
        return found

    def read(self, found: Found, names: Sequence[str]) -> Batch:
        """Return the keys of rows and some fields, which must be there for all of them."""
        unknown = [name for name in names if name not in self.specs]
        missing = unknown or [name for name in names if not found.has(self.slots([name])).all()]
        if missing:
            raise ColumnMissing(f"partition {self.name!r}: {', '.join(missing)} not put for all of the keys")
        return self.rows.read(found.rows, ["key", *self.slots(names)])

    def present(self, cells: Batch, names: Sequence[str]) -> Any:
        """Return fields in the form that users get."""
        columns = dict(zip(names, self.slots(names), strict=True))
        specs = {name: self.specs[name] for name in names}
        return codec.present(specs, {name: cells[slot] for name, slot in columns.items()}, len(cells))

    # Tags

    def tags(self, groups: Int64s | None = None) -> dict[int, Tag]:
        """Return tags by the group of their row; where there are several, the last counts."""

        def read() -> dict[int, Tag]:
            found = self._tags.find(groups)
            cells = self._tags.read(found.rows, ["tag"])["tag"]
            return {group: _tag(cell) for group, cell in zip(found.groups.tolist(), cells, strict=True)}

        return _again(read)

    def set_tags(self, groups: Int64s, tags: Sequence[Tag]) -> None:
        """Put tags, and let those go that they replace."""
        before = self._tags.find(groups).rows
        cells = Column.of("bytes", [_packed(tag) for tag in tags])
        self._tags.put({"tag": cells, "group_id": groups})
        self._tags.drop(before, "replaced")

    def clear(self, found: Found) -> None:
        """Drop rows with their tags."""
        self.rows.drop(found.rows, "cleared")
        self._tags.drop(self._tags.find(found.groups).rows, "cleared")


class Client:
    """The calls on one queue; safe to use from many threads."""

    def __init__(self, queue: TransferQueue, polling: bool = False) -> None:
        self.queue = queue
        self._patience = 0.0 if polling else FETCH_SECONDS
        self._partitions: dict[str, Partition] = {}
        self._streams: dict[tuple[str, str, int], Stream] = {}
        self._lock = threading.RLock()

    def _partition(self, name: str) -> Partition:
        """Return a partition, which is made if there is none."""
        with self._lock:
            if name not in self._partitions:
                self._partitions[name] = Partition(self.queue, name)
            return self._partitions[name]

    def _existing(self, name: str) -> Partition | None:
        if name not in self._partitions and _ROWS + name not in self.queue.status().tables:
            return None
        partition = self._partition(name)
        partition.learn()
        return partition

    def kv_batch_put(
        self,
        keys: list[str],
        partition_id: str,
        fields: Any = None,
        tags: list[Tag] | None = None,
        data_parser: Callable[[Any], Any] | None = None,
    ) -> KVBatchMeta:
        """Put fields or tags, or both, for keys; `fields` is a TensorDict or a mapping, a value for each key."""
        if data_parser is not None:
            raise StorageError("data_parser: code is never sent to the queue; parse before the put")
        if fields is None and tags is None:
            raise SchemaError("a put needs fields or tags")
        if tags is not None and len(tags) != len(keys):
            raise SchemaError(f"{len(tags)} tags for {len(keys)} keys")
        if len(set(keys)) != len(keys):
            raise SchemaError("a key stands twice in one put")
        cells = {name: codec.encode(name, data) for name, data in (fields.items() if fields is not None else ())}
        wrong = {name: len(column) for name, (_, column) in cells.items() if len(column) != len(keys)}
        if wrong:
            raise SchemaError(f"{len(keys)} keys, but fields of {wrong} values")
        return self._put(self._partition(partition_id), keys, cells, tags)

    def _put(
        self, partition: Partition, keys: list[str], cells: Mapping[str, tuple[Spec, Column]], tags: list[Tag] | None
    ) -> KVBatchMeta:
        partition.declare({name: spec for name, (spec, _) in cells.items()})
        found = partition.admit(keys)
        columns = zip(partition.slots(cells), cells.values(), strict=True)
        try:
            if cells:
                partition.rows.write(found.rows, Batch({slot: column for slot, (_, column) in columns}))
        except CellConflict as error:
            message = f"{error}: put a key again only with the same value, or under another field, or clear it first"
            raise CellConflict(message) from error
        before = partition.tags(found.groups)
        merged = [before.get(group, {}) for group in found.groups.tolist()]
        if tags is not None:
            merged = [{**old, **tag} for old, tag in zip(merged, tags, strict=True)]
            partition.set_tags(found.groups, merged)
        names = sorted({*partition.common(found), *cells})
        return KVBatchMeta(list(keys), merged, partition_id=partition.name, fields=names)

    def kv_batch_get(
        self, keys: list[str] | str, partition_id: str, select_fields: list[str] | str | None = None
    ) -> Any:
        """Return fields in the order of the keys, all that they have in common unless told otherwise."""
        wanted = _listed(keys)
        partition = self._existing(partition_id)
        if partition is None:
            raise SchemaError(f"no partition {partition_id!r}: nothing was put there")
        places, found = partition.locate(wanted)
        names = [wanted[place] for place in places.tolist()]
        if not names:
            raise SchemaError(f"partition {partition_id!r} has none of the keys {', '.join(map(repr, wanted[:8]))}")
        if len(names) < len(wanted):
            log.warning(
                "partition %r: %d of %d keys found, the others are left out", partition_id, len(names), len(wanted)
            )
        chosen = partition.common(found) if select_fields is None else _listed(select_fields)
        batch = partition.read(found, chosen)
        if batch["key"].strings() != names:
            raise SchemaError(f"partition {partition_id!r}: two keys share a hash; rename one of them")
        return partition.present(batch, chosen)

    def kv_list(self, partition_id: str | None = None) -> dict[str, dict[str, Tag]]:
        """Return the tag of each key, by partition; nothing is read but keys and tags."""
        if partition_id is None:
            names = [name.removeprefix(_ROWS) for name in self.queue.status().tables if name.startswith(_ROWS)]
        else:
            names = [partition_id]
        partitions = [each for each in map(self._existing, names) if each is not None]
        return {each.name: _again(partial(_tagged, each)) for each in partitions}

    def kv_clear(self, keys: list[str] | str, partition_id: str) -> None:
        """Drop keys with their fields and tags; those that there are not are left alone."""
        partition = self._existing(partition_id)
        if partition is not None:
            partition.clear(partition.locate(_listed(keys))[1])

    def get_meta(
        self,
        data_fields: list[str],
        batch_size: int,
        partition_id: str,
        mode: Literal["fetch", "force_fetch"] = "fetch",
        task_name: str | None = None,
        sampling_config: Mapping[str, Any] | None = None,
    ) -> BatchMeta:
        """Hand out rows that have the fields, each once for a task; `force_fetch` looks at all and takes none."""
        if mode not in ("fetch", "force_fetch"):
            raise SchemaError(f"mode is 'fetch' or 'force_fetch', not {mode!r}: rows are made by kv_batch_put")
        if sampling_config:
            raise StorageError("sampling_config: choose the sampler of a task with Table.task instead")
        partition = self._partition(partition_id)
        partition.declare(dict.fromkeys(data_fields))
        if mode == "force_fetch":
            return _looked(partition, data_fields)
        if task_name is None or not data_fields:
            raise SchemaError("fetch needs a task_name and at least one field")
        return self._fetch(partition, sorted(set(data_fields)), batch_size, task_name)

    def _fetch(self, partition: Partition, names: list[str], batch_size: int, task: str) -> BatchMeta:
        stream = self._stream(partition, names, batch_size, task)
        try:
            lease = stream.next(self._patience)
        except WaitTimeout:
            if self._patience:
                raise
            return BatchMeta.empty()
        if lease is None:
            return BatchMeta.empty()
        # As in the public package, what is handed out counts as consumed: its users have nothing to acknowledge with.
        lease.done()
        if not partition.specs.keys() >= set(names):
            partition.learn()
        return _described(partition, names, lease.rows, np.ones(len(lease), np.int8), lease.batch)

    def _stream(self, partition: Partition, names: list[str], batch_size: int, task: str) -> Stream:
        with self._lock:
            key = partition.name, task, batch_size
            if key not in self._streams:
                partition.rows.task(task, reads=("key", *partition.slots(names)))
                self._streams[key] = partition.rows.stream(task, rows=batch_size, consumer="kv")
            return self._streams[key]

    def get_data(self, metadata: BatchMeta) -> Any:
        """Return the fields of rows, in their order."""
        if len(metadata) == 0 or not metadata.field_names:
            return codec.present({}, {}, 0)
        if len(set(metadata.partition_ids)) > 1:
            raise SchemaError("rows of several partitions: read them partition by partition")
        partition, names = self._partition(metadata.partition_ids[0]), metadata.field_names
        if not partition.specs.keys() >= set(names):
            partition.learn()
        if metadata.cells is not None:
            return partition.present(metadata.cells, names)
        rows = np.asarray(metadata.global_indexes, np.int64)
        return partition.present(partition.rows.read(rows, partition.slots(names)), names)


def _slot(number: int) -> str:
    return f"field {number}"


def _hashes(keys: Sequence[str]) -> Int64s:
    return np.fromiter((xxhash.xxh3_64_intdigest(key.encode()) >> 2 for key in keys), np.int64, len(keys))


def _lookup(groups: Int64s, wanted: Int64s) -> tuple[Int64s, npt.NDArray[np.bool_]]:
    """Return where each wanted group stands first among `groups`, and whether it does."""
    distinct, first = np.unique(groups, return_index=True)
    if len(distinct) == 0:
        return np.zeros(len(wanted), np.int64), np.zeros(len(wanted), np.bool_)
    at = np.searchsorted(distinct, wanted).clip(max=len(distinct) - 1)
    return first[at], distinct[at] == wanted


def _again(read: Callable[[], R]) -> R:
    """Look and read; again if a row went in between."""
    for _ in range(_TRIES):
        try:
            return read()
        except RowGone:
            continue
    return read()


def _packed(tag: Tag) -> bytes:
    try:
        return msgspec.msgpack.encode(tag)
    except (TypeError, OverflowError) as error:
        raise SchemaError(f"a tag holds plain values: {error}") from error


def _tag(cell: object) -> Tag:
    return msgspec.msgpack.decode(bytes(cell), type=Tag) if isinstance(cell, bytes) else {}


def _tagged(partition: Partition) -> dict[str, Tag]:
    found = partition.rows.find()
    keys = partition.rows.read(found.rows, ["key"])["key"].strings()
    tags = partition.tags()
    return {key: tags.get(group, {}) for key, group in zip(keys, found.groups.tolist(), strict=True)}


def _looked(partition: Partition, names: list[str]) -> BatchMeta:
    found = partition.rows.find()
    status = found.has(partition.slots(names)).astype(np.int8)
    return _described(partition, sorted(set(names)), found.rows, status, None, found.groups)


def _described(
    partition: Partition,
    names: list[str],
    rows: Int64s,
    status: npt.NDArray[np.int8],
    cells: Batch | None,
    groups: Int64s | None = None,
) -> BatchMeta:
    groups = cells["group_id"].array if groups is None and cells is not None else groups
    tags = partition.tags(groups)
    metas = [tags.get(group, {}) for group in ([] if groups is None else groups.tolist())]
    return BatchMeta(rows.tolist(), [partition.name] * len(rows), names, status, metas, cells=cells)


def _listed(names: list[str] | str) -> list[str]:
    return [names] if isinstance(names, str) else list(names)


# The calls as functions, on the queue of this process.

_client: Client | None = None
_opening = threading.Lock()


def init(
    conf: Any = None,
    url: str = "embedded://",
    keys: str | os.PathLike[str] | None = None,
    encrypt_bulk: bool = False,
    memory_limit: int | None = None,
    spill: str | os.PathLike[str] | None = None,
) -> Any:
    """Reach the queue at `url`, or make it and serve it there; return `conf`. Again, it changes nothing.

    Of `conf` only `controller.polling_mode` counts: `get_meta` then returns an empty batch instead of waiting.
    The queue lives as long as the process that was first. `keys` and `encrypt_bulk` are those of `TransferQueue.open`
    and `serve`, `memory_limit` and `spill` those of `open`: they count in the process that was first.
    """
    global _client
    controller = conf.get("controller", {}) if conf else {}
    sampler = controller.get("sampler") or "SequentialSampler"
    name = sampler if isinstance(sampler, str) else getattr(sampler, "__name__", type(sampler).__name__)
    if name != "SequentialSampler":
        raise StorageError(f"sampler {name}: rows come in order here; Table.task(sampler='group') hands out groups")
    with _opening:
        if _client is None:
            queue = TransferQueue.open(memory_limit=memory_limit, spill=spill)
            _client = Client(_reach(queue, url, keys, encrypt_bulk), bool(controller.get("polling_mode", False)))
    return conf


def _reach(queue: TransferQueue, url: str, keys: str | os.PathLike[str] | None, encrypt_bulk: bool) -> TransferQueue:
    if url == "embedded://":
        return queue
    try:
        queue.serve(url, keys, encrypt_bulk)
    except StorageError:
        # Another process was first, or it is an address of another host.
        queue.close()
        return TransferQueue.open(url, keys=keys, encrypt_bulk=encrypt_bulk)
    return queue


def close() -> None:
    """Leave the queue; idempotent."""
    global _client
    with _opening:
        if _client is not None:
            _client.queue.close()
            _client = None


def get_client() -> Client:
    """Return the client of this process."""
    if _client is None:
        raise StorageError("there is no queue yet: call init first")
    return _client


def kv_batch_put(
    keys: list[str],
    partition_id: str,
    fields: Any = None,
    tags: list[Tag] | None = None,
    data_parser: Callable[[Any], Any] | None = None,
) -> KVBatchMeta:
    """See `Client.kv_batch_put`."""
    return get_client().kv_batch_put(keys, partition_id, fields, tags, data_parser)


def kv_batch_get(keys: list[str] | str, partition_id: str, select_fields: list[str] | str | None = None) -> Any:
    """See `Client.kv_batch_get`."""
    return get_client().kv_batch_get(keys, partition_id, select_fields)


def kv_list(partition_id: str | None = None) -> dict[str, dict[str, Tag]]:
    """See `Client.kv_list`."""
    return get_client().kv_list(partition_id)


def kv_clear(keys: list[str] | str, partition_id: str) -> None:
    """See `Client.kv_clear`."""
    get_client().kv_clear(keys, partition_id)


def get_meta(
    data_fields: list[str],
    batch_size: int,
    partition_id: str,
    mode: Literal["fetch", "force_fetch"] = "fetch",
    task_name: str | None = None,
    sampling_config: Mapping[str, Any] | None = None,
) -> BatchMeta:
    """See `Client.get_meta`."""
    return get_client().get_meta(data_fields, batch_size, partition_id, mode, task_name, sampling_config)


def get_data(metadata: BatchMeta) -> Any:
    """See `Client.get_data`."""
    return get_client().get_data(metadata)
