"""Snapshots: a consistent cut of all tables in a folder, and a queue made of one.

A cut is taken in one moment (`Store.cut`) and written later, while the queue goes on. A snapshot is a manifest and one
file per table. The files have new names each time; once they are on the disk the manifest is written beside its
predecessor and renamed over it, which is the moment in which the new snapshot takes the place of the old one. So a
folder holds a whole snapshot or none, wherever a save is cut off. What such a save has left goes with the next one.

The manifest names each file with its size and xxh3, and ends with its own. All are compared before anything is made.
"""

import fcntl
import itertools
import os
import re
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from io import BufferedReader, BufferedWriter
from pathlib import Path
from typing import TypeVar

import msgspec
import numpy as np
import xxhash

from asyncflow.errors import StorageError
from asyncflow.storage import frames, image
from asyncflow.storage.spill import Spill
from asyncflow.storage.store import Store, TableCut
from asyncflow.storage.unit import Block

S = TypeVar("S")

FORMAT = 1
MANIFEST = "manifest.json"
_KIND = "asyncflow.storage snapshot"
_OURS = re.compile(r"[0-9a-f]{16}\.(\d+\.table|manifest)")
_PIECE = 1 << 20
_MAX_MANIFEST = 64 << 20
_JUMP = 1 << 40
_LENGTH = 8


@dataclass(frozen=True, slots=True)
class Cut:
    """All tables in one moment, and the numbers that are never given again."""

    tables: list[TableCut]
    bases: dict[str, int]
    """The next row of each table that was dropped."""
    lease: int
    """No lease has had this id, nor a higher one."""


@dataclass(frozen=True, slots=True)
class Held:
    """What a queue begins with."""

    stores: list[Store]
    bases: dict[str, int]
    leases: Iterator[int]


class File(msgspec.Struct, forbid_unknown_fields=True):
    """A file of a snapshot."""

    name: str
    bytes: int
    xxh3: str


class Manifest(msgspec.Struct, forbid_unknown_fields=True):
    """What a snapshot consists of."""

    kind: str
    format: int
    tables: list[File]
    bases: dict[str, int]
    lease: int


class _Begin(msgspec.Struct):
    """What every format of a manifest has."""

    kind: str = ""
    format: int = 0


# Writing


def write(cut: Cut, folder: Path) -> None:
    """Write a snapshot, which takes the place of the one in the folder; a StorageError leaves that one as it was."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder):
            _replace(cut, folder)
        _sync(folder.parent)
    except (OSError, ValueError, TypeError, OverflowError) as error:
        with suppress(OSError):
            folder.rmdir()  # which it is not while there is a snapshot in it
        raise StorageError(f"no snapshot was written to {folder}: {error}") from error


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Keep other writers out of a folder; the lock goes with its process."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise StorageError(f"another snapshot is being written to {folder}: wait for it") from None
        yield
    finally:
        os.close(descriptor)


def _replace(cut: Cut, folder: Path) -> None:
    name = secrets.token_hex(8)
    try:
        files = [_write_table(table, folder / f"{name}.{number}.table") for number, table in enumerate(cut.tables)]
        _write_manifest(Manifest(_KIND, FORMAT, files, cut.bases, cut.lease), folder / f"{name}.manifest")
        _sync(folder)
        (folder / f"{name}.manifest").replace(folder / MANIFEST)
    except BaseException:
        _clear(folder, lambda path: path.name.startswith(name))
        raise
    _sync(folder)
    # Only what is not needed any more: should this fail, the snapshot is written all the same.
    with suppress(OSError):
        _clear(folder, lambda path: not path.name.startswith(name))


def _clear(folder: Path, unwanted: Callable[[Path], bool]) -> None:
    for path in folder.iterdir():
        if _OURS.fullmatch(path.name) and unwanted(path):
            path.unlink(missing_ok=True)


def _write_table(cut: TableCut, path: Path) -> File:
    """Write one table: the frames of its blocks one after another, its image, and the length of that."""
    with _created(path) as file:
        target = _Digested(file)
        blocks = [_write_block(block, target) for block in cut.blocks]
        tail = image.encode(_image(cut, blocks))
        target.write(tail)
        target.write(len(tail).to_bytes(_LENGTH, "little"))
    return File(path.name, target.size, target.digest.hexdigest())


class _Digested:
    """A file, what is written to it, and the digest of that."""

    def __init__(self, file: BufferedWriter) -> None:
        self._file, self.size, self.digest = file, 0, xxhash.xxh3_64()

    def write(self, content: frames.Buffer) -> int:
        self.digest.update(content)
        written = self._file.write(content)
        self.size += written
        return written


def _write_block(block: Block, target: _Digested) -> image.BlockImage:
    layout, buffers = frames.pack(block.batch)
    sizes = [target.write(buffer) for buffer in buffers]
    return image.BlockImage(block.rows, block.places, block.dead, layout, sizes)


def _image(cut: TableCut, blocks: list[image.BlockImage]) -> image.TableImage:
    first = np.array([rows[0] if len(rows) else 0 for rows in cut.puts.values()], np.int64)
    count = np.array([len(rows) for rows in cut.puts.values()], np.int64)
    puts = image.PutsImage(list(cut.puts), first, count)
    return image.TableImage(cut.name, cut.columns, cut.max_rows, cut.max_bytes, cut.ledger, puts, blocks, cut.replicas)


def _write_manifest(manifest: Manifest, path: Path) -> None:
    content = msgspec.json.encode(manifest)
    with _created(path) as file:
        file.write(content + b"\n" + xxhash.xxh3_64_hexdigest(content).encode() + b"\n")


@contextmanager
def _created(path: Path) -> Iterator[BufferedWriter]:
    """Open a new file that only its owner may read; it is on the disk when this ends."""
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# Reading


def whole(folder: Path) -> bool:
    """Whether there is a snapshot in a folder, complete but perhaps damaged since."""
    return (folder / MANIFEST).exists()


def read(folder: Path, spill: Spill | None = None) -> Held:
    """Return what a snapshot holds; a StorageError names the file that is missing, damaged or foreign."""
    files, bases, leases = opened(folder)
    return Held([table(path, lambda cut: Store.of(cut, leases, spill)) for path in files], bases, leases)


def opened(folder: Path) -> tuple[list[Path], dict[str, int], Iterator[int]]:
    """Return the files of the tables of a snapshot, which are whole, and the numbers that go on."""
    manifest = _manifest(folder / MANIFEST)
    for file in manifest.tables:
        _verify(folder / file.name, file)
    # Ids of leases that were handed out after the snapshot, and lost with the queue, must stay without meaning too.
    leases = itertools.count(manifest.lease + _JUMP + secrets.randbelow(_JUMP))
    return [folder / file.name for file in manifest.tables], manifest.bases, leases


def _manifest(path: Path) -> Manifest:
    try:
        with open(path, "rb") as file:
            content = file.read(_MAX_MANIFEST)
    except OSError as error:
        raise StorageError(f"{path.parent} is no snapshot: {path} cannot be read: {error}") from error
    body, _, rest = content.partition(b"\n")
    try:
        begin = msgspec.json.decode(body, type=_Begin)
    except (ValueError, RecursionError) as error:
        raise StorageError(f"{path} is damaged, or no manifest of a snapshot: {error}") from error
    if begin.kind != _KIND or begin.format != FORMAT:
        raise StorageError(f"{path} is foreign or damaged: {begin.kind!r} of format {begin.format}; expected {FORMAT}")
    if rest != xxhash.xxh3_64_hexdigest(body).encode() + b"\n":
        raise StorageError(f"{path} is damaged: it does not match its checksum")
    try:
        manifest = msgspec.json.decode(body, type=Manifest)
    except ValueError as error:
        raise StorageError(f"{path} is no manifest of a snapshot: {error}") from error
    for table in manifest.tables:
        if not _OURS.fullmatch(table.name):
            raise StorageError(f"{path} names {table.name!r}, which is no file of a snapshot")
    return manifest


def _verify(path: Path, file: File) -> None:
    """Compare a file with its size and checksum."""
    digest, size = xxhash.xxh3_64(), 0
    try:
        with open(path, "rb") as content:
            while size <= file.bytes and (piece := content.read(_PIECE)):
                digest.update(piece)
                size += len(piece)
    except OSError as error:
        raise StorageError(f"{path}, which is part of a snapshot, cannot be read: {error}") from error
    if size != file.bytes:
        raise StorageError(f"{path} is damaged: {'more' if size > file.bytes else size} bytes of {file.bytes}")
    if digest.hexdigest() != file.xxh3:
        raise StorageError(f"{path} is damaged: it does not match its checksum")


def table(path: Path, made: Callable[[TableCut], S]) -> S:
    """Return what is made of the table in a file."""
    try:
        with open(path, "rb") as file:
            return made(_read_table(file))
    except (OSError, StorageError, ValueError, LookupError, MemoryError, RecursionError) as error:
        raise StorageError(f"{path} does not hold a table: {error}") from error


def _read_table(file: BufferedReader) -> TableCut:
    end = file.seek(-_LENGTH, os.SEEK_END)
    length = int.from_bytes(file.read(_LENGTH), "little")
    if length > end:
        raise StorageError(f"an image of {length} bytes where {end} are left")
    file.seek(end - length)
    held = image.decode(_exactly(file, length).tobytes())
    puts = {
        each: np.arange(first, first + count)
        for each, first, count in zip(held.puts.ids, held.puts.first.tolist(), held.puts.count.tolist(), strict=True)
    }
    limits = held.max_rows, held.max_bytes, held.replicas
    return TableCut(held.name, held.columns, *limits, held.ledger, puts, _Blocks(file, held.blocks))


class _Blocks:
    """The blocks of an open file, read one after another each time that they are asked for."""

    def __init__(self, file: BufferedReader, held: list[image.BlockImage]) -> None:
        self._file, self._held = file, held

    def __iter__(self) -> Iterator[Block]:
        self._file.seek(0)
        for held in self._held:
            yield _block(self._file, held)


def _block(file: BufferedReader, held: image.BlockImage) -> Block:
    # Each has memory of its own, so that it can go when its rows do.
    batch = frames.unpack(held.layout, [_exactly(file, size).data for size in held.frames])
    if len(held.rows) != len(held.places) or np.any((held.places < 0) | (held.places >= len(batch))):
        raise StorageError("rows that lie outside of their block")
    block = Block(batch, held.rows, held.places)
    block.dead = held.dead
    return block


def _exactly(file: BufferedReader, size: int) -> "np.ndarray[tuple[int], np.dtype[np.uint8]]":
    """Read so many bytes; a number that is larger than the rest of the file is refused before memory is taken."""
    left = os.fstat(file.fileno()).st_size - file.tell()
    if not 0 <= size <= left:
        raise StorageError(f"{size} bytes are expected where {left} are left")
    content = np.empty(size, np.uint8)
    if size and file.readinto(content.data) != size:
        raise StorageError("the file has become shorter while it was read")
    return content
