"""Memory for cells: segments that are faulted in once and used again and again, shared by the processes of a host.

Page faults, not copies, are what a transfer costs. So memory is cut from segments that live on: a writer fills one
from front to back, and it is used anew when its writer has left it, no array is on it, and no reader pins it.

Who owns what. The process that holds the queue makes, grants and recycles all segments. A client writes only into
segments granted to it, and maps others read-only. Each answer that points into a segment pins it for the session
that gets it, until the client tells that its last array on it is gone. A session that is lost may still be alive:
segments that it wrote or pinned are never used again, only let go. So no array ever changes under its reader.

A process that is forked from one of these cuts nothing: it would write where its parent does. Arrays in shared
segments that it inherits are its parent's, and good only as long as the parent keeps them.

Names are random, files have mode 0600. The owner holds a lock as long as it lives; whoever makes an arena later
removes the files of owners that do not.
"""

import fcntl
import mmap
import os
import secrets
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from asyncflow.errors import WireError

FOLDER = Path("/dev/shm")
_PREFIX = "asyncflow-"
ALIGN = 64
_LEAST = 4 << 20
_SPARE = 512 << 20
"""Bytes of segments that are kept for the next writer; more are let go."""
_POPULATE_WRITE = 23
_PROOF = 16
_CHALLENGES = 4096
"""How many sessions may be greeted at once."""
_PRIVATE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS

Bytes = npt.NDArray[np.uint8]


class Region:
    """Some bytes of a segment; arrays made of it keep it, and its end is noted for whoever counts."""

    __slots__ = ("__array_interface__", "_slab", "address", "ended", "offset", "segment", "shared")

    def __init__(self, slab: "Slab", offset: int, nbytes: int, ended: deque[int], *, writable: bool) -> None:
        self._slab, self.ended = slab, ended
        self.segment, self.offset, self.address = slab.number, offset, slab.address + offset
        self.shared = slab.shared
        self.__array_interface__ = {
            "data": (self.address, not writable),
            "shape": (nbytes,),
            "typestr": "|u1",
            "version": 3,
        }

    def __del__(self) -> None:
        self.ended.append(self.segment)  # only a note: a destructor may run at any moment, and must take no lock

    def array(self) -> Bytes:
        """Return the bytes as an array."""
        return np.asarray(self)


@dataclass(slots=True, eq=False)
class Slab:
    """A segment as one process has mapped it."""

    number: int
    size: int
    mapping: mmap.mmap
    address: int
    shared: bool
    """Whether other processes can map it."""
    filled: int = 0
    """Bytes that its writer has cut from it."""


def region_of(array: npt.NDArray[np.generic]) -> Region | None:
    """Return the region that the memory of an array belongs to."""
    base: object = array
    while isinstance(base, np.ndarray | memoryview):
        base = base.base if isinstance(base, np.ndarray) else base.obj
    return base if isinstance(base, Region) else None


class Writer:
    """Cuts regions from granted segments, front to back; safe from many threads."""

    def __init__(self, grant: Callable[[int, list[int]], Slab | None]) -> None:
        """`grant` gets the bytes that are needed and the segments that are left: filled, and without a region."""
        self._grant = grant
        self._lock = threading.Lock()
        self._slab: Slab | None = None
        self._open: Counter[int] = Counter()
        self._ended: deque[int] = deque()
        self._process = os.getpid()

    def take(self, nbytes: int) -> Region | None:
        """Return a writable region, or None if there is no memory for it."""
        if os.getpid() != self._process:
            return None
        with self._lock:
            slab = self._room(nbytes)
            if slab is None:
                return None
            region = Region(slab, slab.filled, nbytes, self._ended, writable=True)
            slab.filled += nbytes + -nbytes % ALIGN
            self._open[slab.number] += 1
            return region

    def _room(self, nbytes: int) -> Slab | None:
        if nbytes > _LEAST // 2:  # a segment of its own, lest one that is soon to go is kept by small things beside it
            return self._next(nbytes)
        if self._slab is None or self._slab.filled + nbytes > self._slab.size:
            slab = self._next(nbytes)
            if slab is None:
                return None
            self._slab = slab
        return self._slab

    def owns(self, region: Region) -> bool:
        """Whether a region was cut by this writer."""
        return region.ended is self._ended

    def _next(self, nbytes: int) -> Slab | None:
        while self._ended:
            self._open[self._ended.popleft()] -= 1
        current = None if self._slab is None else self._slab.number
        left = [number for number, regions in self._open.items() if regions == 0 and number != current]
        for number in left:
            del self._open[number]
        granted = self._grant(nbytes, left)
        if granted is not None:
            granted.filled = 0
        return granted


@dataclass(slots=True, eq=False)
class _Segment:
    """What the owner knows of a segment."""

    slab: Slab
    writer: int | None
    """Session that fills it; None when it has left."""
    regions: int = 0
    pins: Counter[int] = field(default_factory=Counter)
    lost: bool = False


class Arena:
    """The segments of one queue, in the process that holds it; safe from many threads."""

    def __init__(self) -> None:
        self.name = secrets.token_hex(8)
        self._lock = threading.Lock()
        self._segments: dict[int, _Segment] = {}
        self._free: list[Slab] = []
        self._ended: deque[int] = deque()
        self._readers: set[int] = set()
        self._last = 0
        self._owner: int | None = None
        self._closed = False

    @property
    def shared(self) -> bool:
        """Whether new segments can be mapped by other processes."""
        return self._owner is not None

    @property
    def nbytes(self) -> int:
        """Bytes of all segments, spare ones included."""
        with self._lock:
            self._collect()
            return sum(each.slab.size for each in self._segments.values()) + sum(slab.size for slab in self._free)

    @property
    def used(self) -> int:
        """Bytes of the segments that somebody writes, reads or has cells in."""
        with self._lock:
            self._collect()
            return sum(each.slab.size for each in self._segments.values())

    def share(self) -> str:
        """Make further segments as files that other processes can map, and return the name of the arena."""
        with self._lock:
            if self._owner is None:
                sweep()
                self._owner = _claim(_path(self.name))
                self._drop(self._free)
            return self.name

    def challenge(self, session: int) -> tuple[int, bytes] | None:
        """Write what nobody can know into the file of the arena, and return place and bytes; None if nothing is shared.

        A name alone proves little: a copy of the host, such as a machine made from its image, has the same files.
        """
        proof, at = secrets.token_bytes(_PROOF), session % _CHALLENGES * _PROOF
        with self._lock:
            if self._owner is None:
                return None
            try:
                os.pwrite(self._owner, proof, at)
            except OSError:  # no memory
                return None
        return at, proof

    def grant(self, nbytes: int, left: list[int], session: int) -> Slab | None:
        """Give a session a segment with room for so many bytes to write into; None if there is no memory for it.

        The session has left others for good, which are used again once they are empty.
        """
        size = max(1, -(-nbytes // _LEAST)) * _LEAST
        with self._lock:
            if self._closed:
                return None
            self._collect()
            self._leave(left, session)
            fits = [slab for slab in self._free if size <= slab.size <= 4 * size]
            slab = min(fits, key=lambda each: each.size) if fits else self._make(size)
            if slab is None and self._free:  # spare segments of other sizes may be what is in the way
                self._drop(self._free)
                slab = self._make(size)
            if slab is None:
                return None
            if fits:
                self._free.remove(slab)
            self._segments[slab.number] = _Segment(slab, session)
            return slab

    def region(self, number: int, offset: int, nbytes: int, session: int) -> Region:
        """Return what a session wrote into a segment of its own; anything out of bounds is a WireError."""
        with self._lock:
            segment = self._segments.get(number)
            if segment is None or segment.writer != session:
                raise WireError(f"segment {number} is not written by this client")
            if not (0 <= offset <= segment.slab.size - nbytes and offset % ALIGN == 0 and nbytes >= 0):
                raise WireError(f"bytes {offset} to {offset + nbytes} of a segment of {segment.slab.size}")
            segment.regions += 1
            return Region(segment.slab, offset, nbytes, self._ended, writable=False)

    def admit(self, session: int) -> None:
        """Hear of a session that maps the segments."""
        with self._lock:
            self._readers.add(session)

    def pin(self, number: int, session: int) -> None:
        """Keep a segment for a session that is about to read it; one that has left will read nothing."""
        with self._lock:
            if session in self._readers:
                self._segments[number].pins[session] += 1

    def unpin(self, counts: dict[int, int], session: int) -> None:
        """Hear that a session has let so many pins of segments go."""
        with self._lock:
            for number, count in counts.items():
                segment = self._segments.get(number)
                if segment is None or not 0 < count <= segment.pins[session]:
                    raise WireError(f"segment {number} is not pinned {count} times by this client")
                segment.pins[session] -= count
                self._settle(number)

    def forget(self, session: int) -> None:
        """Hear that a session has ended: what it could still write or read is not used again."""
        with self._lock:
            self._readers.discard(session)
            for number, segment in list(self._segments.items()):
                if segment.writer == session or segment.pins[session]:
                    segment.lost = True
                    segment.writer = None if segment.writer == session else segment.writer
                    del segment.pins[session]
                self._settle(number)

    def writer(self, session: int) -> Writer:
        """Return a writer for the owner itself, whose segments are left as those of any other are."""
        return Writer(lambda nbytes, left: self.grant(nbytes, left, session))

    def close(self) -> None:
        """Remove every file; arrays that are left keep their memory. Idempotent."""
        with self._lock:
            self._closed = True
            self._drop([segment.slab for segment in self._segments.values()])
            self._drop(self._free)
            self._segments.clear()
            if self._owner is not None:
                _path(self.name).unlink(missing_ok=True)
                os.close(self._owner)
                self._owner = None

    def _leave(self, segments: list[int], session: int) -> None:
        for number in segments:
            segment = self._segments.get(number)
            if segment is None or segment.writer != session:
                raise WireError(f"segment {number} is not written by this client")
            segment.writer = None
            self._settle(number)

    def _collect(self) -> None:
        """Count the regions that ended."""
        while self._ended:
            number = self._ended.popleft()
            if number in self._segments:
                self._segments[number].regions -= 1
                self._settle(number)

    def _settle(self, number: int) -> None:
        segment = self._segments[number]
        if segment.writer is not None or segment.regions or any(segment.pins.values()):
            return
        del self._segments[number]
        spare = sum(slab.size for slab in self._free) + segment.slab.size
        if segment.lost or spare > _SPARE or self.shared != segment.slab.shared:
            self._drop([segment.slab])
        else:
            self._free.append(segment.slab)

    def _make(self, size: int) -> Slab | None:
        self._last += 1
        try:
            if self.shared and size > _available() // 2:  # others need some of it too
                return None
            # Private, so that a forked process keeps what it had, as with any other memory.
            mapping = _create(_path(self.name, self._last), size) if self.shared else mmap.mmap(-1, size, _PRIVATE)
        except (OSError, OverflowError):
            return None
        with suppress(OSError, ValueError):  # an older kernel faults the pages in when they are first written
            mapping.madvise(_POPULATE_WRITE)
        return Slab(self._last, size, mapping, _address(mapping), self.shared)

    def _drop(self, slabs: list[Slab]) -> None:
        for slab in slabs:
            if slab.shared:
                _path(self.name, slab.number).unlink(missing_ok=True)
        slabs.clear()


class Window:
    """The segments of an arena as a client maps them."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._slabs: dict[tuple[int, bool], Slab] = {}
        self._ended: deque[int] = deque()

    @staticmethod
    def visible(name: str, at: int, proof: bytes) -> bool:
        """Whether this process can map the segments of an arena: it sees what the owner has just written there."""
        return _known(name) and os.access(_path(name), os.R_OK | os.W_OK) and _at(_path(name), at, proof)

    def slab(self, number: int, *, writable: bool) -> Slab:
        """Map a segment; a WireError if there is none."""
        with self._lock:
            key = (number, writable)
            if key not in self._slabs:
                self._prune()
                self._slabs[key] = _open(_path(self._name, number), number, writable=writable)
            return self._slabs[key]

    def region(self, number: int, offset: int, nbytes: int) -> Region:
        """Return bytes to read, which the owner has pinned for this client."""
        slab = self.slab(number, writable=False)
        if not 0 <= offset <= slab.size - nbytes:
            raise WireError(f"bytes {offset} to {offset + nbytes} of a segment of {slab.size}")
        return Region(slab, offset, nbytes, self._ended, writable=False)

    def unpinned(self) -> dict[int, int]:
        """Return the pins that are not needed any more, since last asked."""
        counts: Counter[int] = Counter()
        while self._ended:
            counts[self._ended.popleft()] += 1
        return dict(counts)

    def close(self) -> None:
        """Let all mappings go; arrays that are left keep theirs."""
        with self._lock:
            self._slabs.clear()

    def _prune(self) -> None:
        for number, writable in list(self._slabs):
            if not _path(self._name, number).exists():  # numbers are never used again
                del self._slabs[number, writable]


def sweep() -> None:
    """Remove the files of arenas whose owner is gone."""
    for path in FOLDER.glob(f"{_PREFIX}*"):
        name = path.name.removeprefix(_PREFIX)
        if not _known(name):
            continue
        with suppress(OSError), _locked(path):
            for left in FOLDER.glob(f"{_PREFIX}{name}-*"):
                left.unlink(missing_ok=True)
            path.unlink(missing_ok=True)


def segment_path(name: str, number: int) -> Path:
    """Return the file of a segment; a WireError if no arena has such a name."""
    if not _known(name):
        raise WireError(f"{name!r} is not the name of an arena")
    return _path(name, number)


def _claim(path: Path) -> int:
    """Make the file of an owner and lock it; whoever sweeps between the two has removed it, then it is made again."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        if os.fstat(descriptor).st_nlink:
            return descriptor
        os.close(descriptor)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


def _available() -> int:
    status = os.statvfs(FOLDER)
    return status.f_bavail * status.f_frsize


def _known(name: str) -> bool:
    return len(name) == 16 and set(name) <= set("0123456789abcdef")


def _at(path: Path, at: int, proof: bytes) -> bool:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        return len(proof) == _PROOF and os.pread(descriptor, _PROOF, at) == proof
    except (OSError, OverflowError):
        return False
    finally:
        os.close(descriptor)


def _path(name: str, number: int | None = None) -> Path:
    return FOLDER / (f"{_PREFIX}{name}" if number is None else f"{_PREFIX}{name}-{number}")


def _create(path: Path, size: int) -> mmap.mmap:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, size)  # fails here where memory is short, not with SIGBUS at a write
        return mmap.mmap(descriptor, size)
    except OSError:
        path.unlink()
        raise
    finally:
        os.close(descriptor)


def _open(path: Path, number: int, *, writable: bool) -> Slab:
    try:
        descriptor = os.open(path, (os.O_RDWR if writable else os.O_RDONLY) | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise WireError(f"segment {path.name} cannot be mapped: {error.strerror}") from error
    size = os.fstat(descriptor).st_size
    access = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
    try:
        mapping = mmap.mmap(descriptor, size, mmap.MAP_SHARED | mmap.MAP_POPULATE, access)
    except (OSError, ValueError) as error:
        raise WireError(f"segment {path.name} cannot be mapped: {error}") from error
    finally:
        os.close(descriptor)
    return Slab(number, size, mapping, _address(mapping), shared=True)


def _address(mapping: mmap.mmap) -> int:
    address: int = np.frombuffer(mapping, np.uint8).__array_interface__["data"][0]
    return address
