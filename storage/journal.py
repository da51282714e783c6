"""The journal of a queue: what happens is written to a log before anybody is told, so that it outlives the process.

A folder holds a log of effects (`effect`, `log`) with the cells of puts and writes, and after a while a base, which
is a snapshot, and the log since. The log grows with what happens and not with what is held, so from time to time it
begins anew: a cut is taken, the next log begins with the leases in force, and the base is written while the queue goes
on. Until it is complete the logs before are kept, so that the folder can be opened wherever this is cut off.

`journal` writes a record before the answer: the kernel has it, whatever becomes of the process. `fsync` also has it on
the disk before the answer. Answers wait for that in order, outside of the queue's lock, and all that wait at one time
share one call; nobody is told of anything, nor handed it, that a loss of power could still undo.
"""

import fcntl
import logging
import os
import shutil
import threading
import weakref
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from pathlib import Path

from asyncflow.errors import StorageError
from asyncflow.storage import effect, log, recovery, snapshot
from asyncflow.storage.batch import Batch
from asyncflow.storage.recovery import Folder, Numbers
from asyncflow.storage.snapshot import Cut, Held
from asyncflow.storage.spill import Spill
from asyncflow.storage.ticket import Answer, Outcome

LEVELS = ("memory", "journal", "fsync")
_LEAST = 64 << 20
"""Bytes of a log below which it is not begun anew."""

logger = logging.getLogger(__name__)


def open_journal(
    durability: str, folder: "str | os.PathLike[str] | None", spill: Spill | None = None
) -> "tuple[Journal, Held] | None":
    """Return the journal that was chosen and what its folder holds; None for `memory`."""
    if durability not in LEVELS:
        raise StorageError(f"durability {durability!r}: expected {', '.join(LEVELS)}")
    if (folder is not None) != (durability != "memory"):
        raise StorageError(
            f"durability {durability!r} {'needs the folder' if folder is None else 'has no folder'} of its log"
        )
    return None if folder is None else Journal.open(Path(folder), sync=durability == "fsync", spill=spill)


class Journal:
    """Records what happens to all tables of a queue; the calls of the queue's lock are marked."""

    def __init__(self, folder: Path, lock: int, found: recovery.Recovered | None, sync: bool, least: int) -> None:
        """Go on with what was found in a folder that is locked, or begin the first log."""
        self.folder = folder
        self._claim, self._sync, self._least = lock, sync, least
        self._number = 1 if found is None else found.number
        self._log = (
            self._begin(1, []) if found is None else _continue(Folder(folder).log(found.number), found.end, sync)
        )
        self._before = 0 if found is None else found.nbytes - found.end  # bytes of older logs since the base
        self._due = least
        self._late: list[tuple[str, effect.Effect]] = []
        self._lock = threading.Lock()
        self._alarm = threading.Condition(self._lock)
        self._answers: list[tuple[Answer, Outcome]] = []
        self._busy = self._ended = False
        self._broken: StorageError | None = None
        self._report = ""
        self.failed: Callable[[str], None] = lambda report: None
        """Told when the disk has failed, after which nothing more can be promised."""
        self._syncer = threading.Thread(target=self._answer_synced, name="asyncflow-sync", daemon=True)
        self._syncer.start()
        _opened.add(self)

    @classmethod
    def open(
        cls, folder: Path, *, sync: bool, least: int | None = None, spill: Spill | None = None
    ) -> "tuple[Journal, Held]":
        """Take a folder for this process, and return what it holds; nothing if it is new."""
        try:
            folder.mkdir(parents=True, exist_ok=True)
            folder = folder.resolve()
            lock = _lock(folder)
            try:
                return cls._opened(folder, lock, sync, _LEAST if least is None else least, spill)
            except BaseException:
                os.close(lock)
                raise
        except OSError as error:
            raise StorageError(f"the journal in {folder} cannot be opened: {error}") from error

    @classmethod
    def _opened(cls, folder: Path, lock: int, sync: bool, least: int, spill: Spill | None) -> "tuple[Journal, Held]":
        content = Folder.of(folder)
        if not content.logs and not content.bases:
            return cls(folder, lock, None, sync, least), Held([], {}, Numbers(1))
        found = recovery.recover(content, spill)
        journal = cls(folder, lock, found, sync, least)
        try:
            journal._clear(content.since()[0])
            journal._append("", effect.Recalled())
        except BaseException:
            journal._end()
            raise
        return journal, found.held

    # Under the queue's lock

    def scribe(self, table: str) -> "TableScribe":
        """Return what records the effects on a table."""
        return TableScribe(self, table)

    def before(self, table: str, made: effect.Effect, batch: Batch | None = None) -> None:
        """Record what is about to happen (StorageError)."""
        self.catch_up()
        self._append(table, made, batch)

    def after(self, table: str, made: effect.Effect) -> None:
        """Record what has happened; if that fails it is kept (StorageError)."""
        self._late.append((table, made))
        self.catch_up()

    def catch_up(self) -> None:
        """Record what could not be recorded when it happened (StorageError)."""
        if self._broken is not None:
            raise type(self._broken)(*self._broken.args)
        while self._late:
            self._append(*self._late[0])
            del self._late[0]

    def _append(self, table: str, made: effect.Effect, batch: Batch | None = None) -> None:
        self._log.append(table, made, batch)

    def due(self, living: Callable[[], int]) -> bool:
        """Whether the log should begin anew, since it is more than twice as large as the cells that live."""
        size = self._before + self._log.end
        return size > self._due and size > 2 * living()

    def turn(self, kept: Iterable[tuple[str, effect.Effect]]) -> int:
        """Begin the next log, for a cut that is taken now; return its number (StorageError: nothing has changed)."""
        self.catch_up()
        old = self._log
        if self._sync and not self._synced(old):
            self.catch_up()
        try:
            fresh = self._begin(self._number + 1, kept)
        except OSError as error:
            raise StorageError(f"no new log was begun in {self.folder}: {error}") from error
        with self._lock:
            self._log = fresh
        self._number += 1
        self._before += old.end
        # Should the base not be written, the next try waits for as much again.
        self._due = self._before + self._least
        return self._number

    def _begin(self, number: int, kept: Iterable[tuple[str, effect.Effect]]) -> log.Log:
        path, place = self.folder / "log.new", Folder(self.folder).log(number)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        fresh = log.Log(place, descriptor, len(log.BEGIN), self._sync)
        os.pwrite(descriptor, log.BEGIN, 0)
        for table, made in kept:
            fresh.append(table, made)
        # At every level: a base without its log could not be opened.
        os.fsync(descriptor)
        fresh.synced = fresh.end
        path.rename(place)
        _sync_folder(self.folder)
        return fresh

    # Outside of it

    def compact(self, cut: Cut, number: int) -> None:
        """Write the base of a log, and remove what it takes the place of (StorageError: all of that is kept)."""
        snapshot.write(cut, Folder(self.folder).base(number))
        with suppress(OSError):
            self._clear(number)
        self._before = 0
        self._due = self._least

    def _clear(self, first: int) -> None:
        """Remove logs and bases before one, and bases that were not completed."""
        content = Folder.of(self.folder)
        for number in [number for number in content.logs if number < first]:
            content.log(number).unlink(missing_ok=True)
        for path in self.folder.glob("base.*"):
            digits = path.name.removeprefix("base.")
            if digits.isdecimal() and (int(digits) < first or not snapshot.whole(path)):
                shutil.rmtree(path)

    # Answers

    def answered(self, answer: Answer) -> Answer:
        """Return an answer that is given when all that happened before it is as safe as was chosen."""
        return partial(self._later, answer) if self._sync else answer

    def _later(self, answer: Answer, outcome: Outcome) -> None:
        with self._lock:
            idle = not self._busy and not self._answers and self._log.synced == self._log.end
            waits = not (idle or self._ended or self._broken is not None)
            if waits:
                self._answers.append((answer, outcome))
                self._alarm.notify()
        if not waits:
            self._give(answer, outcome)

    def _answer_synced(self) -> None:
        while True:
            with self._lock:
                self._busy = False
                while not (self._answers or self._ended or self._report):
                    self._alarm.wait()
                if self._ended and not self._answers:
                    return
                answers, self._answers, current = self._answers, [], self._log
                self._busy = True
            self._synced(current)
            for answer, outcome in answers:
                self._give(answer, outcome)
            if self._report:
                self._report, report = "", self._report
                self.failed(report)

    def _synced(self, current: log.Log) -> bool:
        """Sync a log, for any thread; whether it is on the disk."""
        try:
            if self._broken is None:
                current.sync()
        except OSError as error:
            # What the kernel could not write it may have forgotten: a second try would prove nothing.
            report = f"{current.path} could not be synced to the disk: {error.strerror}; open the folder anew"
            logger.error(report)
            with self._lock:
                self._broken, self._report = StorageError(report), report
                self._alarm.notify()
        return self._broken is None

    def _give(self, answer: Answer, outcome: Outcome) -> None:
        try:
            answer(outcome if self._broken is None else type(self._broken)(*self._broken.args))
        except Exception:
            # A border of the process: those who wait behind this one must have their answers.
            logger.exception("an answer could not be given")

    def close(self) -> None:
        """Give the answers that wait, and leave the folder to others; idempotent."""
        with self._lock:
            if self._ended:
                return
            self._ended = True
            self._alarm.notify()
        self._syncer.join()
        if self._sync:
            self._synced(self._log)
        self._end()

    def _end(self) -> None:
        with self._lock:
            self._ended = True
            self._alarm.notify()
        self.let_go()

    def let_go(self) -> None:
        """Close files and lock."""
        _opened.discard(self)
        self._log.release()
        if self._claim >= 0:
            claim, self._claim = self._claim, -1
            os.close(claim)


class TableScribe:
    """Records the effects on one table."""

    def __init__(self, journal: Journal, table: str) -> None:
        self._journal, self._table = journal, table

    def ready(self) -> None:
        """Refuse if nothing can be recorded now."""
        self._journal.catch_up()

    def before(self, made: effect.Effect, batch: Batch | None = None) -> None:
        """Record what is about to happen."""
        self._journal.before(self._table, made, batch)

    def after(self, made: effect.Effect) -> None:
        """Record what has happened."""
        self._journal.after(self._table, made)


def _continue(path: Path, end: int, sync: bool) -> log.Log:
    """Open a log to go on from where its whole records end."""
    found = log.Log(path, os.open(path, os.O_RDWR | os.O_CLOEXEC), end, sync)
    os.truncate(path, end)
    if sync:
        found.synced = 0
        found.sync()
    return found


def _lock(folder: Path) -> int:
    """Keep other processes out of a folder, as long as this one lives."""
    descriptor = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise StorageError(f"{folder} is the journal of another queue that is open: end that one first") from None
    return descriptor


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


_opened: "weakref.WeakSet[Journal]" = weakref.WeakSet()


def _forked() -> None:
    # A child that outlives its parent would keep the lock of the folder.
    for journal in list(_opened):
        journal.let_go()


os.register_at_fork(after_in_child=_forked)
