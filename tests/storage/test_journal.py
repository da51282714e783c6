"""What comes back of a queue whose process ended: all that anybody was told, and nothing by halves."""

import os
import resource
import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from queue import SimpleQueue
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule
from msgspec.structs import replace

from asyncflow.errors import LeaseLost, StorageError
from asyncflow.storage import Batch, Schema, TransferQueue, journal, log, wire
from asyncflow.storage.client import Table
from asyncflow.storage.controller import Controller
from asyncflow.storage.link import EmbeddedLink
from tests.storage import mortals
from tests.storage.mortals import PATIENCE, WIDTH, Nursery
from tests.storage.test_kills import acks, drain, puts, whole, worked
from tests.storage.test_machine import QueueMachine
from tests.storage.test_snapshot import COLUMNS, KINDS, PLAYS, PUT, Player

LEVELS = ("journal", "fsync")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "journal"


@pytest.fixture(scope="module")
def nursery(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nursery]:
    yield from mortals.nursery(tmp_path_factory.mktemp("nursery"))


def opened(folder: Path, durability: str = "journal") -> TransferQueue:
    return TransferQueue.open(durability=durability, folder=folder)


def copied(folder: Path, place: Path) -> Path:
    """Return a copy of a folder as it stands, which is what a crash would leave."""
    return Path(shutil.copytree(folder, place))


def boundaries(path: Path) -> list[int]:
    """Return where the records of a log end."""
    reader = log.Reader(path)
    return [*(entry.offset for entry in reader), reader.end]


def send(table: Table, put_id: bytes) -> list[int]:
    batch = Batch.of(table.schema, {"x": [[1], [2]]})
    answer = table.link.send(wire.Put(table.name, put_id), batch).result(PATIENCE)[0]
    assert isinstance(answer, wire.Rows)
    rows: list[int] = wire.unpack(answer.rows).tolist()
    return rows


# What comes back


@pytest.mark.parametrize("durability", LEVELS)
def test_everything_that_was_told_comes_back(folder: Path, tmp_path: Path, durability: str) -> None:
    with opened(folder, durability) as queue:
        table = queue.create_table("train", Schema(COLUMNS), max_rows=100, max_bytes=1 << 20)
        table.task("learn", ["x"], durable=True)
        rows = table.put(PUT | {"source": ["a", "b", "c"], "half": [np.arange(n, dtype=np.uint16) for n in (0, 9, 3)]})
        shared = table.put(PUT, repeat=3)
        table.add_columns({"late": "float32"})
        table.write(rows[:2], {"y": ["eins", "zwei"], "late": np.float32([1, np.nan])})
        table.drop(rows[2:], "filtered")
        lease = table.stream("learn", rows=2).next()
        assert lease is not None
        lease.done(4)
        table.commit("learn", 4)
        table.seal()
        ledger, status = table.ledger(), table.status()
        held = table.read(shared, list(PUT))
        with opened(copied(folder, tmp_path / "copy"), durability) as again:
            back = again.table("train")
            assert (back.ledger(), back.status()) == (ledger, status)
            assert back.read(shared, list(PUT)).equals(held)


def test_leases_end_and_their_attempts_count(folder: Path, tmp_path: Path) -> None:
    with opened(folder) as queue:
        table = queue.create_table("train", Schema(COLUMNS))
        table.task("learn", ["x"], max_attempts=2)
        table.put(PUT)
        stream = table.stream("learn", rows=1)
        first, second = stream.next(), stream.next()
        assert first is not None
        assert second is not None
        first.release()
        place = copied(folder, tmp_path / "copy")
        for attempt in (2, 3):
            with opened(place) as again, again.table("train").stream("learn", rows=3) as there:
                back = there.next()
                assert back is not None
                assert (back.rows.tolist(), back.attempt) == ([0, 1, 2], attempt)
                assert back.id > second.id
                with pytest.raises(LeaseLost):
                    again.table("train").adopt(second.id, [1]).done()
                shutil.copytree(place, tmp_path / f"copy{attempt}")
            place = tmp_path / f"copy{attempt}"


def test_ids_go_on_and_a_put_sent_again_is_harmless(folder: Path) -> None:
    with opened(folder) as queue:
        table = queue.create_table("train", Schema(COLUMNS))
        assert send(table, b"same") == [0, 1]
        table.drop([0, 1], "gone")
        queue.drop_table("train")
        queue.create_table("train", Schema(COLUMNS)).put(PUT, repeat=2)
    with opened(folder) as queue:
        table = queue.table("train")
        rows = send(table, b"other")
        assert rows == [8, 9]
        assert table.read([8, 9], ["group_id"])["group_id"].array.tolist() == [3, 4]
        queue.drop_table("train")
    with opened(folder) as queue, pytest.raises(StorageError, match="no table"):
        queue.table("train")
    with opened(folder) as queue:
        table = queue.create_table("train", Schema(COLUMNS))
        assert send(table, b"new") == [10, 11]
    with opened(folder) as queue:
        assert send(queue.table("train"), b"new") == [10, 11]
        assert queue.table("train").ledger().admitted == 2


def test_a_folder_has_one_queue_at_a_time(folder: Path) -> None:
    with opened(folder):
        with pytest.raises(StorageError, match=f"{folder} is the journal of another queue"):
            opened(folder)
        # A child that lives on must not keep it.
        alive, tells = os.pipe()
        child = os.fork()
        if child == 0:
            os.write(tells, b"!")
            os.read(os.pipe()[0], 1)
        os.read(alive, 1)
    try:
        opened(folder).close()
    finally:
        os.kill(child, 9)
        os.waitpid(child, 0)
        os.close(alive)
        os.close(tells)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"durability": "disk"}, "expected memory, journal, fsync"),
        ({"durability": "journal"}, "needs the folder"),
        ({"folder": "/tmp"}, "has no folder"),
        ({"url": "ipc:///tmp/none", "durability": "journal", "folder": "/tmp"}, "held by another process"),
        ({"durability": "fsync", "folder": "/proc/none"}, "cannot be opened"),
    ],
)
def test_what_cannot_be_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(StorageError, match=message):
        TransferQueue.open(**options)


# Any queue, at any moment


@settings(
    max_examples=15,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example],
)
@given(st.lists(st.sampled_from(list(KINDS)), min_size=1, max_size=2, unique=True), PLAYS, PLAYS, st.data())
def test_a_journal_brings_back_what_a_snapshot_would(
    tasks: list[str], before: list[tuple[str, int, int]], after: list[tuple[str, int, int]], data: st.DataObject
) -> None:
    anew = data.draw(st.sets(st.integers(0, len(before)), max_size=2))
    with TemporaryDirectory() as place, opened(Path(place, "journal")) as queue:
        table = queue.create_table("train", Schema(COLUMNS), max_rows=60)
        for task in tasks:
            table.task(task, ["x", "y"] if len(task) % 2 else ["x"], max_attempts=100, **KINDS[task])
        player = Player(table, tasks)
        for number, play in enumerate(before):
            if number in anew:
                queue.snapshot(Path(place, "journal"))
            player.play(*play)
        queue.snapshot(Path(place, "saved"))
        crash = copied(Path(place, "journal"), Path(place, "crash"))
        with closing(TransferQueue.restore(Path(place, "saved"))) as saved, opened(crash) as back:
            here, there = (Player(each.table("train"), tasks) for each in (saved, back))
            assert bare(there.table) == bare(here.table)
            for play in after:
                assert there.play(*play) == here.play(*play)
            assert there.table.ledger() == here.table.ledger()
        cut_anywhere(Path(place, "journal"), Path(place, "cut"), data)


def bare(table: Table) -> object:
    """Return how a table stands; when it joins what is left of blocks depends on when rows went."""
    status = table.status()
    return status.tasks, status.rows, status.sealed, status.bytes > 0, table.ledger()


def cut_anywhere(folder: Path, place: Path, data: st.DataObject) -> None:
    """Open what there was after any record."""
    shutil.copytree(folder, place)
    path = max(place.glob("log.*"), key=lambda each: int(each.suffix[1:]))
    os.truncate(path, data.draw(st.sampled_from(boundaries(path))))
    with opened(place) as queue:
        for name in queue.status().tables:
            table = queue.table(name)
            counts = table.ledger()
            assert (
                counts.admitted
                == counts.done + sum(counts.dropped.values()) + counts.live
                == counts.done + sum(counts.dropped.values()) + len(table.find())
            )
            table.read(table.find().rows, ["x"])


def test_no_sampler_chooses_otherwise_when_it_is_asked_again(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with opened(folder) as queue:
        table = queue.create_table("train", Schema(COLUMNS))
        for task, options in KINDS.items():
            table.task(task, ["x"], max_attempts=100, **options)
        player, random = Player(table, list(KINDS)), np.random.default_rng(0)
        acts = ["put", "put", "next", "next", "next", "next", "done", "done", "release", "drop", "rewind", "commit"]
        for number in range(600):
            if number % 150 == 75:
                queue.snapshot(folder)
            player.play(acts[random.integers(len(acts))], *random.integers(0, 40, 2).tolist())
        ledger = table.ledger()
    with opened(folder) as queue:
        assert queue.table("train").ledger() == ledger
    assert not caplog.records


class CrashMachine(QueueMachine):
    """A queue under random use, as in `test_machine`, that ends now and then and is opened again."""

    def __init__(self) -> None:
        super().__init__()
        self.queue.close()
        self.place = TemporaryDirectory()
        self.open()

    def open(self) -> None:
        recorder, content = journal.Journal.open(Path(self.place.name), sync=False)
        self.controller = Controller(lambda: self.now, content, recorder)
        self.queue = TransferQueue(EmbeddedLink(self.controller))

    @precondition(lambda self: self.rows)
    @rule()
    def crash(self) -> None:
        self.queue.close()
        self.open()
        self.table = self.queue.table("t")
        for held in self.held:
            for row in self.living(held):
                self.rows[row].views[held.task].state = "open"
        over = [*self.over, *(held.lease for held in self.held)]
        self.over = [self.table.adopt(lease.id, lease.rows) for lease in over[-3:]]
        self.held, self.streams = [], {}

    @rule()
    def begin_anew(self) -> None:
        self.queue.snapshot(self.place.name)

    def teardown(self) -> None:
        super().teardown()
        self.place.cleanup()


TestCrashes = CrashMachine.TestCase
TestCrashes.settings = settings(max_examples=10, stateful_step_count=40, deadline=None)


# A log that was cut off, or damaged


def held(folder: Path) -> Path:
    with opened(folder) as queue:
        table = queue.create_table("train", Schema(COLUMNS))
        table.put(PUT)
        table.put(PUT | {"y": ["a" * 40000] * 3})
    return folder / "log.1"


def test_what_was_not_written_to_its_end_is_cut_off(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = held(folder)
    content, ends = path.read_bytes(), boundaries(path)
    last = ends[-2]
    cells = range(last + 600, len(content) - 600, 997)  # of the large ones, every byte would say the same
    sizes = [*range(last, last + 600), *cells, *range(len(content) - 600, len(content))]
    for count in sizes:
        path.write_bytes(content[:count])
        reader = log.Reader(path)
        assert len(list(reader)) == len(ends) - 2
        assert (reader.end, bool(reader.torn)) == (last, count > last)
    for count in sizes[::120]:
        path.write_bytes(content[:count])
        with opened(folder) as queue:
            assert queue.table("train").ledger().admitted == 3
        assert bool(caplog.records) == (count > last)
        assert not caplog.records or f"{count - last} bytes from byte {last} on are cut off" in caplog.text
        caplog.clear()
        with opened(folder) as queue:
            assert queue.table("train").put(PUT).tolist() == [3, 4, 5]
        assert not caplog.records


def test_damage_before_what_was_written_later_is_refused(folder: Path) -> None:
    path = held(folder)
    content, ends = bytearray(path.read_bytes()), boundaries(path)
    for at in range(ends[-2]):
        content[at] ^= 1 << at % 8
        path.write_bytes(content)
        with pytest.raises(StorageError, match=rf"{path} is (damaged at byte|foreign)") as error:
            opened(folder)
        if at >= ends[0]:
            assert f"at byte {max(end for end in ends if end <= at)}," in str(error.value)
        content[at] ^= 1 << at % 8
    path.write_bytes(content)
    opened(folder).close()


def test_what_no_sync_had_reached_is_no_damage(folder: Path) -> None:
    """After a loss of power a later page may be there and an earlier one not."""
    log_file = log.Log(folder, os.open(folder, os.O_RDWR | os.O_CREAT), len(log.BEGIN), sync=True)
    os.pwrite(log_file._file, log.BEGIN, 0)
    for number in range(3):
        log_file.append("t", journal.effect.Committed("a", number))
        if number == 0:
            log_file.sync()
    ends = boundaries(folder)
    for number, error in ((0, True), (1, False)):
        place = folder.with_suffix(f".{number}")
        shutil.copy(folder, place)
        with open(place, "r+b") as file:
            os.pwrite(file.fileno(), bytes(20), ends[number])
        reader = log.Reader(place)
        if error:
            with pytest.raises(StorageError, match="damaged"):
                list(reader)
        else:
            assert len(list(reader)) == 1
            assert reader.torn


def test_a_log_that_is_missing_is_named(folder: Path) -> None:
    held(folder)
    with opened(folder) as queue:
        queue.snapshot(folder)
    (folder / "log.2").rename(folder / "aside")
    with pytest.raises(StorageError, match=r"log\.2 is missing"):
        opened(folder)


# A disk that fails


def size(folder: Path) -> int:
    return max(path.stat().st_size for path in folder.glob("log.*"))


@contextmanager
def full(folder: Path, room: int = 50) -> Iterator[None]:
    """Let no file of this process grow beyond the log and so much, as on a full disk: writes fail in their middle."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size(folder) + room, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


REFUSED = r"log\.1 cannot be written, so nothing was changed"


@pytest.mark.parametrize("durability", LEVELS)
def test_what_a_full_disk_refuses_has_not_happened(folder: Path, tmp_path: Path, durability: str) -> None:
    with opened(folder, durability) as queue:
        table = queue.create_table("train", Schema(COLUMNS))
        table.task("learn", ["x"], durable=True)
        rows = table.put(PUT)
        lease = table.stream("learn", rows=2).next()
        assert lease is not None
        before, clocks = table.status(), {"tasks": {}, "holdings": []}
        acts: list[Callable[[], object]] = [
            lambda: send(table, b"id"),
            lambda: table.write(rows, {"y": ["a", "b", "c"]}),
            lambda: lease.done(1),
            lambda: lease.release(),
            lambda: table.stream("learn", rows=1).next(),
            lambda: table.drop(rows, "gone"),
            lambda: table.commit("learn", 1),
            lambda: table.reset("learn"),
            lambda: table.add_columns({"z": "int8"}),
            lambda: table.task("more", ["x"]),
            table.seal,
            lambda: queue.create_table("other", Schema(COLUMNS)),
            table.drop_table,
        ]
        with full(folder):
            for act in acts:
                with pytest.raises(StorageError, match=REFUSED):
                    act()
                assert replace(table.status(), **clocks) == replace(before, **clocks)
                assert table.status().tasks["learn"].leased == 2
                assert table.read(rows, ["x"])["x"].lengths.tolist() == [2, 0, 1]
        assert send(table, b"id") == [3, 4]
        lease.done(1)
        more = table.stream("learn", rows=1).next()
        assert more is not None
        assert (more.rows.tolist(), more.attempt) == ([2], 1)
        ledger = table.ledger()
        with opened(copied(folder, tmp_path / "copy"), durability) as again:
            assert again.table("train").ledger() == ledger
            assert send(again.table("train"), b"id") == [3, 4]


def test_what_happens_while_the_disk_is_full_is_recorded_later(folder: Path, tmp_path: Path) -> None:
    now = [0.0]
    recorder, content = journal.Journal.open(folder, sync=False)
    with TransferQueue(EmbeddedLink(Controller(lambda: now[0], content, recorder))) as queue:
        table = queue.create_table("train", Schema(COLUMNS))
        table.task("learn", ["x"], max_attempts=2, lease_seconds=10_000)
        table.put(PUT)
        stream = table.stream("learn", rows=2)
        for turn in (1, 2):
            assert stream.next() is not None
            with full(folder):
                now[0] += 20_000
                assert table.status().tasks["learn"].leased == 2
                with pytest.raises(StorageError, match="log"):
                    stream.next(timeout=0)
                assert table.status().tasks["learn"].leased == 0
                assert table.ledger().dropped == ({"max_attempts:learn": 2} if turn == 2 else {})
        lease = table.stream("learn", rows=1).next()
        assert lease is not None
        assert (lease.rows.tolist(), lease.attempt) == ([2], 1)
        ledger = table.ledger()
        with opened(copied(folder, tmp_path / "copy")) as again:
            assert again.table("train").ledger() == ledger


def test_those_who_wait_are_told_when_nothing_can_be_recorded(folder: Path, pool: ThreadPoolExecutor) -> None:
    with opened(folder) as queue:
        table = queue.create_table("train", Schema(COLUMNS), max_rows=3)
        table.task("late", ["y"])
        rows = table.put(PUT)
        sizes = [size(folder)]
        for act in (lambda: table.write(rows[:1], {"y": ["now"]}), lambda: table.drop(rows[2:], "room")):
            act()
            sizes.append(size(folder))
        written, dropped = np.diff(sizes).tolist()
        wait = pool.submit(table.stream("late", rows=2).next, PATIENCE)
        room = pool.submit(table.put, PUT, timeout=PATIENCE)
        mortals.until(lambda: len(table.status().waits) == 2)
        with full(folder, written + 50):  # for what lets them go on, not for that they do
            table.write(rows[1:2], {"y": ["now"]})
            assert isinstance(wait.exception(PATIENCE), StorageError)
        table.status()
        with full(folder, dropped + 400):  # with what could not be recorded before
            table.drop(rows[:2], "room")
            assert isinstance(room.exception(PATIENCE), StorageError)
        assert table.put(PUT).tolist() == [3, 4, 5]


def test_answers_wait_for_the_disk(folder: Path, pool: ThreadPoolExecutor) -> None:
    with opened(folder, "fsync") as queue:
        table = queue.create_table("train", Schema(COLUMNS))
        recorder = table.link._controller._journal  # type: ignore[attr-defined]

        def put(_: int) -> bool:
            before = recorder._log.end
            table.put(PUT)
            return bool(recorder._log.synced > before)

        assert all(pool.map(put, range(40)))
        assert table.ledger().admitted == 120


def test_a_disk_that_fails_ends_the_queue(folder: Path) -> None:
    with opened(folder, "fsync") as queue:
        table = queue.create_table("train", Schema(COLUMNS))
        table.put(PUT)
        # A file that takes everything, and cannot be synced.
        with open("/dev/null", "r+b") as nowhere:
            os.dup2(nowhere.fileno(), table.link._controller._journal._log._file)  # type: ignore[attr-defined]
        with pytest.raises(StorageError, match=r"log\.1 could not be synced to the disk"):
            table.put(PUT)
        for act in (lambda: table.find(), lambda: table.put(PUT)):
            with pytest.raises(StorageError, match="could not be synced"):
                act()
    with opened(folder, "fsync") as queue:
        assert queue.table("train").ledger().admitted == 3


# The log begins anew


def test_a_log_does_not_grow_for_ever(folder: Path) -> None:
    recorder, content = journal.Journal.open(folder, sync=False, least=1 << 20)
    with TransferQueue(EmbeddedLink(Controller(held=content, journal=recorder))) as queue:
        table = queue.create_table("train", Schema({"x": "list<int64>"}))
        table.task("learn", ["x"])
        stream = table.stream("learn", rows=1)
        kept = stream.next(0) if table.put({"x": [[7]]}) is None else stream.next()
        for _ in range(100):
            table.put({"x": [np.arange(10000)]})
            lease = stream.next()
            assert lease is not None
            lease.done()
        assert kept is not None
        kept.done()
        queue.snapshot(folder)
        assert sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) < 1 << 16
        assert len(list(folder.iterdir())) == 3
        assert table.ledger().done == 101
    with opened(folder) as queue:
        assert queue.table("train").ledger().done == 101


def test_a_base_that_was_not_completed_is_not_used(folder: Path) -> None:
    with opened(folder) as queue:
        table = queue.create_table("train", Schema(COLUMNS))
        table.task("learn", ["x"])
        table.put(PUT)
        assert table.stream("learn", rows=1).next() is not None
        with full(folder):  # there is room for the next log, and none for the base
            table.link._controller._journal.turn([])  # type: ignore[attr-defined]
        (folder / "base.2").mkdir()
        (folder / "base.2" / "0.table").write_bytes(b"begun")
        table.put(PUT)
    with opened(folder) as queue:
        assert not (folder / "base.2").exists()
        table = queue.table("train")
        assert table.ledger().admitted == 6
        queue.snapshot(folder)
        assert sorted(path.name for path in folder.iterdir()) == ["base.3", "lock", "log.3"]


# A process that is killed


@pytest.mark.parametrize("durability", LEVELS)
def test_a_killed_queue_comes_back(
    pool: ThreadPoolExecutor, address: str, nursery: Nursery, folder: Path, durability: str
) -> None:
    random = np.random.default_rng(LEVELS.index(durability))
    told, done, tries = 0, 0, 0
    for turn in range(4):
        url = f"{address}{turn}"
        mortal = nursery.start(mortals.hold, url=url, least=1 << 20, durability=durability, folder=str(folder))
        mortal.hear()
        counts = SimpleQueue[Any](), SimpleQueue[Any]()
        clients = [
            pool.submit(worked, work, url, folder, each) for work, each in zip((puts, acks), counts, strict=True)
        ]
        for each in counts:
            for _ in range(random.integers(1, 12)):
                each.get(timeout=PATIENCE)
                told, done = told + (each is counts[0]), done + WIDTH * (each is counts[1])
        time.sleep(random.uniform(0, 0.01))
        mortal.kill()
        mortal.rest()
        assert all(isinstance(client.result(PATIENCE), StorageError) for client in clients)
        told, done, tries = told + counts[0].qsize(), done + WIDTH * counts[1].qsize(), tries + 1
        with opened(copied(folder, folder.with_suffix(f".{turn}"))) as queue:
            ledger = queue.table("t").ledger()
            assert told * WIDTH <= ledger.admitted <= (told + tries) * WIDTH
            assert done <= ledger.done <= done + WIDTH * tries
            assert ledger.admitted == ledger.done + ledger.live
            assert queue.table("t").find().rows.tolist() == list(range(ledger.done, ledger.admitted))
            assert len(whole(queue.table("t"))) == ledger.live
    with opened(folder) as queue:
        table = queue.table("t")
        table.seal()
        drain(table)
        assert table.ledger().done == table.ledger().admitted
