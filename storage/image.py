"""What a snapshot holds of a table but for its cells: values that nobody changes any more.

An image is taken in one moment, by copying the flat arrays that go on changing. Arrays are encoded as their bytes,
little-endian, and their dtypes are those of the fields.
"""

from typing import Any, Literal, TypeAlias, get_args

import msgspec
import numpy as np
import numpy.typing as npt

from asyncflow.storage.frames import Layout
from asyncflow.storage.spec import TaskSpec
from asyncflow.types import Float64s, Int64s

Form: TypeAlias = tuple[int | None, int | None, bool, int]
"""Rows, groups, split and ranks of the steps that a task is divided by."""


class Image(msgspec.Struct, forbid_unknown_fields=True):
    """Base of all images."""


class GroupsImage(Image):
    """Slots from `base`, and the chains of rows."""

    base: int
    unused: int
    ids: Int64s
    first: Int64s
    last: Int64s
    living: Int64s
    next: Int64s
    slot: Int64s


class TraitImage(Image):
    """One number about each row."""

    what: Literal["tokens", "version", "priority"]
    column: str
    values: Float64s


class PartImage(Image):
    """A micro-batch that no rank is done with."""

    step: int
    number: int
    rank: int
    count: int
    rows: Int64s


class BalancedImage(Image):
    """What the sampler `token_balanced` has planned."""

    steps: int
    form: Form | None
    parts: list[PartImage]


class ReplayImage(Image):
    """What the sampler `replay` knows of uses, and where its generator stands."""

    uses: npt.NDArray[np.int32]
    last: Int64s
    pool: Int64s
    newest: float
    by_version: list[tuple[float, Int64s]]
    noted: int
    over: Int64s
    random: tuple[bytes, bytes, int, int]


class TaskImage(Image):
    """One consumer group."""

    name: str
    spec: TaskSpec
    status: npt.NDArray[np.uint8]
    attempts: npt.NDArray[np.int32]
    done: int
    committed: int
    unsettled: dict[int, Int64s]
    balanced: BalancedImage | None = None
    replay: ReplayImage | None = None


class LedgerImage(Image):
    """What became of every row from `base`."""

    base: int
    admitted: int
    done: int
    dropped: dict[str, int]
    sealed: bool
    state: npt.NDArray[np.uint8]
    written: npt.NDArray[np.uint64]
    undone: npt.NDArray[np.int32]
    groups: GroupsImage
    traits: list[TraitImage]
    tasks: list[TaskImage]


class BlockImage(Image):
    """Where the rows of a block lie in it, and the frames of its cells."""

    rows: Int64s
    places: Int64s
    dead: int
    layout: Layout
    frames: list[int]
    """Bytes of each."""


class PutsImage(Image):
    """Puts that are recognised when they are sent again: their ids, oldest first, and the rows of each."""

    ids: list[bytes]
    first: Int64s
    count: Int64s


class TableImage(Image):
    """One table; the frames of its blocks stand before it, in this order."""

    name: str
    columns: dict[str, str]
    max_rows: int | None
    max_bytes: int | None
    ledger: LedgerImage
    puts: PutsImage
    blocks: list[BlockImage]
    replicas: int = 1


def encode(image: TableImage) -> bytes:
    """Return an image as MessagePack."""
    return msgspec.msgpack.encode(image, enc_hook=_plain)


def decode(content: bytes) -> TableImage:
    """Read an image; a ValueError says what does not fit."""
    return msgspec.msgpack.decode(content, type=TableImage, dec_hook=_array)


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.tobytes()
    if isinstance(value, np.generic):
        return value.item()
    raise NotImplementedError(f"{type(value).__name__} has no place in a snapshot")


def _array(kind: Any, content: Any) -> Any:
    """Return the array of a field whose type is `ndarray[shape, dtype[T]]`."""
    (item,) = get_args(get_args(kind)[1])
    return np.frombuffer(content, np.dtype(item).newbyteorder("<")).astype(item)
