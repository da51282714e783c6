"""One file of records, appended to and read from front to back.

A record is a prefix of 32 bytes, a MessagePack header and the frames of a batch (`frames`). The prefix holds the
sizes of the two and the xxh3 of the header, and ends with an xxh3 of its own, so that a length is never believed that
was not written; the header holds the checksum of the cells.

What ends in the middle of a record was being written when the process ended: nobody was told of it, and it is cut
off. Damage before a record that was written later is another matter: what follows cannot be understood without it.
Each record says up to where the file was safe when it was written, which tells the two apart also after a loss of
power, when a later page may be on the disk and an earlier one not.
"""

import mmap
import os
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path

import msgspec
import numpy as np
import xxhash

from asyncflow.errors import StorageError
from asyncflow.storage import frames
from asyncflow.storage.batch import Batch
from asyncflow.storage.effect import Effect

BEGIN = b"asyncflow log 1\n"
"""What a file begins with; the number is that of the format."""
MAGIC = b"\xa5afj"
_SIZES = struct.Struct("<4sIQQ")  # magic, bytes of the header, bytes of the cells, xxh3 of the header
_CHECK = struct.Struct("<Q")
PREFIX = _SIZES.size + _CHECK.size
_MAX_HEADER = 1 << 30
_MOST_BUFFERS = 1024


class Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An effect and the table it happened to."""

    table: str
    effect: Effect
    safe: int
    """The bytes of the file that were safe when this was written."""
    layout: frames.Layout | None = None
    frames: list[int] = []
    """Bytes of each frame."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A record that was read."""

    offset: int
    record: Record
    batch: Batch | None


class Log:
    """A file that records are appended to."""

    def __init__(self, path: Path, descriptor: int, end: int, sync: bool) -> None:
        """Take over a file that is open for writing; with `sync` only what was synced counts as safe."""
        self.path, self.end = path, end
        self._file, self._sync = descriptor, sync
        self.synced = end

    def __del__(self) -> None:
        # Not before: another thread may be syncing what was the current log a moment ago.
        self.release()

    def release(self) -> None:
        """Close the file."""
        if self._file >= 0:
            descriptor, self._file = self._file, -1
            os.close(descriptor)

    def append(self, table: str, effect: Effect, batch: Batch | None = None) -> None:
        """Write a record; if that fails the file is as it was (StorageError)."""
        layout, cells = (None, []) if batch is None else frames.pack(batch)
        record = Record(table, effect, self.synced if self._sync else self.end, layout, [len(each) for each in cells])
        header = _encoder.encode(record)
        sizes = _SIZES.pack(MAGIC, len(header), sum(record.frames), xxhash.xxh3_64_intdigest(header))
        prefix = sizes + _CHECK.pack(xxhash.xxh3_64_intdigest(sizes))
        try:
            self._write([prefix + header, *cells])
        except OSError as error:
            self._restore()
            raise StorageError(f"{self.path} cannot be written, so nothing was changed: {error.strerror}") from error

    def _write(self, buffers: list[frames.Buffer]) -> None:
        rest, at = [memoryview(each) for each in buffers if len(each)], self.end
        while rest:
            written = os.pwritev(self._file, rest[:_MOST_BUFFERS], at)
            at += written
            while rest and written >= len(rest[0]):
                written -= len(rest.pop(0))
            if rest:
                rest[0] = rest[0][written:]
        self.end = at

    def _restore(self) -> None:
        """Cut off what was begun; a later record is written over it in any case."""
        try:
            os.ftruncate(self._file, self.end)
        except OSError as error:
            self.release()
            raise StorageError(f"{self.path} cannot be written, nor cut: {error.strerror}; open it anew") from error

    def sync(self) -> None:
        """Have everything on the disk that has been written up to now; an OSError ends what can be relied on."""
        written = self.end
        if self.synced < written:
            os.fdatasync(self._file)
            self.synced = written


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Record)


# Reading


class Reader:
    """Reads a file from front to back; afterwards `end` is where the whole records end."""

    def __init__(self, path: Path) -> None:
        self.path, self.end = path, len(BEGIN)
        self.torn = ""
        """Why there are bytes after the end, if there are."""

    def __iter__(self) -> Iterator[Entry]:
        with open(self.path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if file.read(len(BEGIN)) != BEGIN:
                raise StorageError(f"{self.path} is foreign or damaged: expected a log of format 1")
            while self.end < size:
                try:
                    entry, end = _entry(file, self.end, size)
                except StorageError as error:
                    self._judge(file, error)
                    return
                yield entry
                self.end = end

    def _judge(self, file: BufferedReader, error: StorageError) -> None:
        """Tell a record that was not written to its end from damage to what was safe."""
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            later = next((at for at, record in _records(content, self.end + 1) if record.safe > self.end), None)
        if later is not None:
            raise StorageError(
                f"{self.path} is damaged at byte {self.end}, before the record at byte {later}: {error}; what follows "
                "cannot be made again without it: bring the file back from a copy, or begin with another folder"
            )
        self.torn = str(error)


def _entry(file: BufferedReader, at: int, size: int) -> tuple[Entry, int]:
    header, cells, digest = _sizes(_read(file, at, PREFIX, size))
    record = _record(_read(file, at + PREFIX, header, size), digest)
    start = at + PREFIX + header
    if sum(record.frames) != cells:
        raise StorageError(f"frames of {sum(record.frames)} bytes where {cells} are told")
    if cells > size - start:
        raise StorageError(f"cells of {cells} bytes where {size - start} are left")
    batch = None if record.layout is None else frames.unpack(record.layout, list(_cells(file, start, record.frames)))
    return Entry(at, record, batch), start + cells


def _cells(file: BufferedReader, at: int, sizes: Sequence[int]) -> Iterator[frames.Buffer]:
    # Memory of its own for each record, so that it can go when its rows do.
    file.seek(at)
    for size in sizes:
        content = np.empty(size, np.uint8)
        if size and file.readinto(content.data) != size:
            raise StorageError("the file has become shorter while it was read")
        yield content.data


def _read(file: BufferedReader, at: int, count: int, size: int) -> bytes:
    if count > size - at:
        raise StorageError(f"{count} bytes are expected where {size - at} are left")
    file.seek(at)
    return file.read(count)


def _sizes(prefix: bytes) -> tuple[int, int, int]:
    """Return bytes of header and cells, and the digest of the header."""
    magic, header, cells, digest = _SIZES.unpack_from(prefix)
    (check,) = _CHECK.unpack_from(prefix, _SIZES.size)
    if magic != MAGIC or check != xxhash.xxh3_64_intdigest(prefix[: _SIZES.size]) or header > _MAX_HEADER:
        raise StorageError("no record begins there")
    return header, cells, digest


def _record(header: bytes, digest: int) -> Record:
    if xxhash.xxh3_64_intdigest(header) != digest:
        raise StorageError("the record does not match its checksum")
    try:
        return _decoder.decode(header)
    except (ValueError, RecursionError) as error:
        raise StorageError(f"the record is of another format: {error}") from error


def _records(content: mmap.mmap, start: int) -> Iterator[tuple[int, Record]]:
    """Return what looks like a record anywhere from `start`."""
    at = content.find(MAGIC, start)
    while at >= 0:
        try:
            header, _, digest = _sizes(content[at : at + PREFIX])
            yield at, _record(content[at + PREFIX : at + PREFIX + header], digest)
        except (StorageError, struct.error):
            pass
        at = content.find(MAGIC, at + 1)
