"""Snapshots: what comes back, what is refused, and what a save that is cut off leaves."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from asyncflow.errors import LeaseLost, StorageError, WaitTimeout
from asyncflow.storage import Batch, Schema, TransferQueue, aio, snapshot, wire
from asyncflow.storage.client import Lease, Stream, Table

COLUMNS = {"x": "list<int64>", "y": "string", "v": "int64", "p": "float64", "half": "list<bfloat16>"}
PUT = {"x": [[1, 2], [], [3]], "v": [1, 2, 3], "p": [0.5, 2.5, 1.5]}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "saved"


@pytest.fixture
def restored(queue: TransferQueue, folder: Path) -> Iterator[Callable[[], TransferQueue]]:
    """Saves the queue, closes nothing, and opens what was saved."""
    opened: list[TransferQueue] = []

    def restore() -> TransferQueue:
        queue.snapshot(folder)
        opened.append(TransferQueue.restore(folder))
        return opened[-1]

    yield restore
    for each in opened:
        each.close()


def same(one: Batch, other: Batch) -> bool:
    return one.names == other.names and all(one[name].equals(other[name]) for name in one.names)


def drain(table: Table, task: str, **wish: Any) -> list[list[int]]:
    """Return the rows of all batches there are now, which are done."""
    batches = []
    with table.stream(task, **wish) as stream, suppress(WaitTimeout):
        while (lease := stream.next(timeout=0)) is not None:
            batches.append(lease.rows.tolist())
            lease.done()
    return batches


def test_values_keys_and_counts_come_back(queue: TransferQueue, restored: Callable[[], TransferQueue]) -> None:
    table = queue.create_table("train", Schema(COLUMNS), max_rows=100, max_bytes=1 << 20)
    rows = table.put(PUT | {"source": ["a", "b", "c"], "half": [np.arange(n, dtype=np.uint16) for n in (0, 9, 3)]})
    shared = table.put(PUT, repeat=3)
    table.write(rows[:2], {"y": ["eins", "zwei"]})
    table.drop(rows[2:], "filtered")
    back = restored().table("train")
    assert back.schema == table.schema
    assert back.ledger() == table.ledger()
    assert back.status() == table.status()
    assert same(back.read(rows[:2], list(COLUMNS)), table.read(rows[:2], list(COLUMNS)))
    identity = ["x", "source", "prompt_id", "group_id", "rollout_id", "segment"]
    assert same(back.read(shared, identity), table.read(shared, identity))
    for found in ("rows", "groups", "written"):
        assert np.array_equal(getattr(back.find(), found), getattr(table.find(), found))


def test_cells_larger_than_a_frame_of_small_ones_come_back(
    queue: TransferQueue, restored: Callable[[], TransferQueue]
) -> None:
    table = queue.create_table("big", Schema({"x": "list<int64>", "m": "float32[4,4]"}))
    random = np.random.default_rng(0)
    cells = {"x": [random.integers(0, 9, n) for n in (9000, 0, 70000)], "m": random.random((3, 4, 4), np.float32)}
    rows = table.put(cells)
    table.drop(rows[1:2], "gone")
    back = restored().table("big")
    assert same(back.read(rows[[2, 0]], ["x", "m"]), table.read(rows[[2, 0]], ["x", "m"]))
    assert back.status().bytes == table.status().bytes
    back.drop(rows, "gone")
    assert back.status().bytes == 0


def test_no_id_is_used_again(queue: TransferQueue, restored: Callable[[], TransferQueue]) -> None:
    table = queue.create_table("train", Schema(COLUMNS))
    last = table.put(PUT, repeat=2)
    groups = table.find().groups
    table.drop(last, "all of them")
    other = queue.create_table("over", Schema({}))
    other.put(Batch({"source": ["a"] * 7}))
    other.drop_table()
    back = restored()
    rows = back.table("train").put(PUT)
    assert rows.min() == last.max() + 1
    assert back.table("train").find().groups.min() == groups.max() + 1
    assert back.create_table("over", Schema({})).put({"source": ["b"]}).tolist() == [7]


def test_a_put_that_is_sent_again_is_harmless(queue: TransferQueue, restored: Callable[[], TransferQueue]) -> None:
    table = queue.create_table("train", Schema(COLUMNS))
    put, batch = wire.Put("train", b"0123456789abcdef"), Batch.of(table.schema, PUT)
    before, _ = table.link.send(put, batch).result(30)
    back = restored().table("train")
    again, _ = back.link.send(put, batch).result(30)
    assert again.rows == before.rows
    assert back.ledger().admitted == 3


def test_what_is_done_stays_done_and_what_was_leased_is_ready(
    queue: TransferQueue, restored: Callable[[], TransferQueue]
) -> None:
    table = queue.create_table("train", Schema(COLUMNS))
    table.task("f", ["x"], max_attempts=2)
    table.task("g", ["y"])
    rows = table.put(PUT)
    stream = table.stream("f", rows=1)
    done, leased = stream.next(), stream.next()
    assert done is not None
    assert leased is not None
    done.done()
    back = restored().table("train")
    assert leased.rows.tolist() == rows[1:2].tolist()
    for end in (Lease.done, Lease.release):
        with pytest.raises(LeaseLost):
            end(back.adopt(leased.id, leased.rows))
    again = back.stream("f", rows=2).next()
    assert again is not None
    assert again.rows.tolist() == rows[1:].tolist()
    assert again.attempt == 2
    assert again.id > leased.id
    again.release(failed=True)
    assert back.ledger().dropped == {"max_attempts:f": 1}
    assert back.status().tasks["g"].blocked == 2


def test_steps_of_a_durable_task_can_be_rewound(queue: TransferQueue, restored: Callable[[], TransferQueue]) -> None:
    table = queue.create_table("train", Schema(COLUMNS))
    table.task("train", ["x"], durable=True)
    rows = table.put(PUT)
    for step, lease in zip((1, 2, 3), table.stream("train", rows=1), strict=False):
        lease.done(step)
        if step == 3:
            break
    table.commit("train", 1)
    back = restored().table("train")
    assert back.ledger().done == 1
    back.rewind("train", 2)
    again = back.stream("train", partial=True, rows=9).next()
    assert again is not None
    assert again.rows.tolist() == [rows[2]]
    with pytest.raises(StorageError, match="committed step 1"):
        back.rewind("train", 0)


def test_a_divided_step_goes_on(queue: TransferQueue, restored: Callable[[], TransferQueue]) -> None:
    table = queue.create_table("train", Schema(COLUMNS))
    table.task("b", ["x"], "token_balanced", tokens="v", budget=4)
    table.put({"x": [[1]] * 12, "v": [1] * 12})
    ranks = [table.stream("b", rows=12, rank=rank, ranks=2) for rank in range(2)]
    first, second = ranks[0].next(), ranks[1].next()
    assert first is not None
    assert second is not None
    assert first.parts > 1
    first.done()
    back = restored().table("train")
    second.release()
    for rank, stream in enumerate(ranks):
        here, there = stream.next(), back.stream("b", rows=12, rank=rank, ranks=2).next()
        assert here is not None
        assert there is not None
        assert (here.step, here.part, here.parts) == (there.step, there.part, there.parts)
        assert here.rows.tolist() == there.rows.tolist()


def test_several_tables_are_of_one_moment(queue: TransferQueue, restored: Callable[[], TransferQueue]) -> None:
    for name in ("one", "two"):
        queue.create_table(name, Schema(COLUMNS)).put(PUT)
    queue.table("two").seal()
    back = restored()
    queue.table("one").put(PUT)
    assert {name: (each.rows, each.sealed) for name, each in back.status().tables.items()} == {
        "one": (3, False),
        "two": (3, True),
    }


def test_the_rows_of_a_restored_queue_can_be_served(
    queue: TransferQueue, restored: Callable[[], TransferQueue], tmp_path: Path
) -> None:
    table = queue.create_table("train", Schema({"x": "list<int64>"}))
    rows = table.put({"x": [np.arange(20000)]})
    url = restored().serve(f"ipc://{tmp_path}/again")
    with TransferQueue.open(url) as client:
        assert np.array_equal(client.table("train").read(rows, ["x"])["x"][0], np.arange(20000))
        client.snapshot(tmp_path / "second")
    with TransferQueue.restore(tmp_path / "second") as second:
        assert second.table("train").find().rows.tolist() == rows.tolist()


async def saved(url: str, folder: Path) -> None:
    async with await aio.connect(url) as queue:
        await queue.snapshot(folder)


def test_a_snapshot_can_be_awaited(queue: TransferQueue, folder: Path) -> None:
    if queue.url != "embedded://":
        asyncio.run(saved(queue.url, folder))
        TransferQueue.restore(folder).close()


def test_a_new_snapshot_takes_the_place_of_the_old(queue: TransferQueue, folder: Path) -> None:
    table = queue.create_table("train", Schema(COLUMNS))
    for rows in (3, 6):
        table.put(PUT)
        queue.snapshot(folder)
        assert sorted(path.suffix for path in folder.iterdir()) == [".json", ".table"]
        with TransferQueue.restore(folder) as back:
            assert back.table("train").ledger().admitted == rows


# Any queue


KINDS: dict[str, dict[str, Any]] = {
    "fifo": {"sampler": "fifo", "durable": True},
    "group": {"sampler": "group"},
    "balanced": {"sampler": "token_balanced", "tokens": "x", "budget": 5},
    "parts": {"sampler": "token_balanced", "tokens": "x", "budget": 4, "durable": True},
    "freshest": {"sampler": "freshest", "version": "v"},
    "priority": {"sampler": "priority", "priority": "p"},
    "replay": {"sampler": "replay", "uses": 3, "version": "v", "max_age": 2, "seed": 5},
    "again": {"sampler": "replay", "uses": 2, "durable": True},
}
WISHES: dict[str, list[dict[str, Any]]] = {
    "group": [{"groups": 2}],
    "balanced": [{"rows": 4, "rank": rank, "ranks": 2} for rank in range(2)],
    "parts": [{"groups": 2, "rank": rank, "ranks": 3} for rank in range(3)],
}
ACTS = ("put", "put", "repeat", "join", "write", "next", "next", "next", "done", "done")
RARE = ("release", "drop", "commit", "rewind", "reset", "restart", "seal")
SMALL = st.integers(0, 40)
PLAYS = st.lists(st.tuples(st.sampled_from((*ACTS, *ACTS, *RARE)), SMALL, SMALL), min_size=30, max_size=60)


class Player:
    """Uses a table by small numbers, and returns what comes of it; the same numbers do the same to equal tables."""

    def __init__(self, table: Table, tasks: list[str]) -> None:
        self.table, self.tasks = table, tasks
        self.leases: list[tuple[str, Lease]] = []
        self.streams: list[tuple[str, Stream]] = []
        self.open()

    def open(self) -> None:
        wishes = [(task, wish) for task in self.tasks for wish in WISHES.get(task, [{"rows": 3}])]
        self.streams = [(task, self.table.stream(task, **wish)) for task, wish in wishes]

    def play(self, act: str, a: int, b: int) -> object:
        try:
            return getattr(self, act)(a, b)
        except StorageError as error:
            return type(error)

    def columns(self, a: int, b: int) -> dict[str, Any]:
        count = 1 + a % 4
        cells: dict[str, Any] = {
            "x": [[7] * ((a + b * i) % 5) for i in range(count)],
            "p": [i * b % 3 for i in range(count)],
        }
        cells["v"] = [max(0, a // 4 - i * b % 3) for i in range(count)]
        cells["p"] = np.array(cells["p"], np.float64)
        return cells | ({"y": ["some"] * count} if b % 2 else {})

    def put(self, a: int, b: int) -> object:
        return self.table.put(self.columns(a, b), timeout=0).tolist()

    def repeat(self, a: int, b: int) -> object:
        return self.table.put(self.columns(a, b), repeat=1 + b % 3, timeout=0).tolist()

    def join(self, a: int, b: int) -> object:
        cells = self.columns(a, b)
        return self.table.put(cells | {"group_id": [b % 5] * len(cells["v"])}, timeout=0).tolist()

    def write(self, a: int, b: int) -> object:
        found = self.table.find()
        rows = found.rows[~found.has(["y"])][a % 3 :][: 1 + b]
        self.table.write(rows, {"y": ["late"] * len(rows)})
        return rows.tolist()

    def next(self, a: int, b: int) -> object:
        task, stream = self.streams[a % len(self.streams)]
        lease = stream.next(timeout=0)
        if lease is None:
            return None
        self.leases.append((task, lease))
        cells = {name: [column.tobytes() for column in lease.batch[name].raw] for name in lease.batch.names}
        return task, lease.rows.tolist(), lease.attempt, lease.step, lease.part, lease.parts, cells

    def done(self, a: int, b: int) -> object:
        if self.leases:
            self.leases.pop(a % len(self.leases))[1].done(step=b % 8)
        return self.table.ledger()

    def release(self, a: int, b: int) -> None:
        if self.leases:
            self.leases.pop(a % len(self.leases))[1].release(failed=bool(b % 2))

    def drop(self, a: int, b: int) -> None:
        self.table.drop(self.table.find().rows[a:][: 1 + b % 3], "chance")

    def commit(self, a: int, b: int) -> None:
        self.table.commit(self.tasks[a % len(self.tasks)], b % 6)

    def rewind(self, a: int, b: int) -> None:
        self.table.rewind(self.tasks[a % len(self.tasks)], b % 8)

    def reset(self, a: int, b: int) -> None:
        self.table.reset(self.tasks[a % len(self.tasks)])

    def restart(self, a: int, b: int) -> None:
        """Go on as after a restore: what is leased is given back, with its attempts."""
        for _, lease in self.leases:
            with suppress(LeaseLost):
                lease.release(failed=True)
        for _, stream in self.streams:
            stream.close()
        self.leases = []
        self.open()

    def seal(self, a: int, b: int) -> None:
        if b % 5 == 0:
            self.table.seal()


@settings(
    max_examples=30,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example],
)
@given(st.lists(st.sampled_from(list(KINDS)), min_size=1, max_size=2, unique=True), PLAYS, PLAYS)
def test_a_restored_queue_gives_the_same_batches(
    tasks: list[str], before: list[tuple[str, int, int]], after: list[tuple[str, int, int]]
) -> None:
    with TemporaryDirectory() as place, TransferQueue.open() as queue:
        table = queue.create_table("train", Schema(COLUMNS), max_rows=60)
        for task in tasks:
            table.task(task, ["x", "y"] if len(task) % 2 else ["x"], max_attempts=100, **KINDS[task])
        here = Player(table, tasks)
        for play in before:
            here.play(*play)
        queue.snapshot(place)
        here.restart(0, 0)
        with closing(TransferQueue.restore(place)) as back:
            there = Player(back.table("train"), tasks)
            assert there.table.status() == table.status()
            for play in after:
                assert there.play(*play) == here.play(*play)
            assert there.table.ledger() == table.ledger()


# Refusals


def holding(queue: TransferQueue, folder: Path) -> list[Path]:
    table = queue.create_table("train", Schema(COLUMNS))
    table.task("replay", ["x"], "replay", uses=2)
    table.put(PUT, repeat=2)
    queue.snapshot(folder)
    return sorted(folder.iterdir())


def test_damage_to_any_byte_is_refused(folder: Path) -> None:
    with TransferQueue.open() as queue:
        paths = holding(queue, folder)
    for path in paths:
        whole = path.read_bytes()
        with open(path, "r+b", buffering=0) as file:
            for at in range(len(whole)):
                os.pwrite(file.fileno(), bytes([whole[at] ^ (1 << at % 8)]), at)
                with pytest.raises(StorageError, match=path.name):
                    snapshot.read(folder)
                os.pwrite(file.fileno(), whole[at : at + 1], at)
    TransferQueue.restore(folder).close()


@pytest.mark.parametrize("change", [lambda whole: whole[:-1], lambda whole: whole + b"\n", lambda whole: b""])
def test_a_file_of_another_length_is_refused(folder: Path, change: Callable[[bytes], bytes]) -> None:
    with TransferQueue.open() as queue:
        paths = holding(queue, folder)
    for path in paths:
        whole = path.read_bytes()
        path.write_bytes(change(whole))
        with pytest.raises(StorageError, match=path.name):
            TransferQueue.restore(folder)
        path.write_bytes(whole)


def test_a_missing_file_is_named(folder: Path) -> None:
    with TransferQueue.open() as queue:
        paths = holding(queue, folder)
    for path in paths:
        aside = path.rename(path.with_suffix(".aside"))
        with pytest.raises(StorageError, match=path.name):
            TransferQueue.restore(folder)
        aside.rename(path)
    with pytest.raises(StorageError, match="nowhere"):
        TransferQueue.restore(folder / "nowhere")


@pytest.mark.parametrize(
    "content",
    [
        b"{}\n",
        b"[" * 10000,
        b'{"kind":"asyncflow.storage snapshot","format":2}\n',
        b'{"kind":"something else","format":1}\n',
    ],
)
def test_a_foreign_manifest_is_refused(folder: Path, content: bytes) -> None:
    folder.mkdir()
    (folder / snapshot.MANIFEST).write_bytes(content)
    with pytest.raises(StorageError, match=snapshot.MANIFEST):
        TransferQueue.restore(folder)


def test_a_snapshot_needs_the_whole_path(queue: TransferQueue) -> None:
    table = queue.create_table("train", Schema(COLUMNS))
    with pytest.raises(StorageError, match="whole path"):
        table.link.send(wire.Snapshot("somewhere")).result(30)


def test_a_place_that_cannot_be_written_is_refused(queue: TransferQueue, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    for place in (tmp_path / "file", tmp_path / "file" / "below", "/proc/nothing"):
        with pytest.raises(StorageError, match="no snapshot was written"):
            queue.snapshot(place)
    assert (tmp_path / "file").read_text() == "mine"
    queue.create_table("train", Schema(COLUMNS)).put(PUT)


def test_what_else_is_in_the_folder_stays(queue: TransferQueue, folder: Path) -> None:
    folder.mkdir()
    (folder / "notes.txt").write_text("mine")
    for _ in range(2):
        queue.snapshot(folder)
    assert (folder / "notes.txt").read_text() == "mine"


# Saves that are cut off


SCRIPT = """
import os, resource, signal, sys, threading
import numpy as np
from asyncflow.errors import StorageError
from asyncflow.storage import Schema, TransferQueue
queue = TransferQueue.open()
table = queue.create_table("train", Schema({"x": "list<int64>"}))
table.put({"x": [[1]]})
queue.snapshot(sys.argv[1])
table.put({"x": [np.arange(1 << 20)] * 4})
print("saved", flush=True)
sys.stdin.readline()
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
"""


def child(folder: Path, then: str) -> "subprocess.Popen[str]":
    """Start a process that has saved one row, holds four more, and does what is asked `then` once it hears a line."""
    arguments = [sys.executable, "-c", SCRIPT + then, str(folder)]
    started = subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert started.stdout is not None
    assert started.stdout.readline() == "saved\n"
    return started


# The kernel ends the process at a byte that is known, with a signal that nothing is done about.
CUT = """
signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
resource.setrlimit(resource.RLIMIT_FSIZE, (9 << 20, 9 << 20))
queue.snapshot(sys.argv[1])
"""


def test_a_save_that_is_cut_off_leaves_the_old_snapshot(folder: Path) -> None:
    with child(folder, CUT) as process:
        old = {path.name: path.read_bytes() for path in folder.iterdir()}
        process.communicate("\n", timeout=300)
    assert process.returncode == -signal.SIGXFSZ
    assert {name: (folder / name).read_bytes() for name in old} == old
    assert len(list(folder.iterdir())) == len(old) + 1
    with TransferQueue.restore(folder) as back:
        assert back.table("train").find().rows.tolist() == [0]
        back.snapshot(folder)
    assert len(list(folder.iterdir())) == len(old)
    TransferQueue.restore(folder).close()


KILLED = """
def kill():
    while len(os.listdir(sys.argv[1])) < 3:
        pass
    os.kill(os.getpid(), signal.SIGKILL)
threading.Thread(target=kill).start()
queue.snapshot(sys.argv[1])
"""


def test_a_process_that_is_killed_while_it_saves_leaves_a_whole_snapshot(folder: Path) -> None:
    with child(folder, KILLED) as process:
        process.communicate("\n", timeout=300)
    assert process.returncode == -signal.SIGKILL
    with TransferQueue.restore(folder) as back:
        assert back.table("train").find().rows.tolist() in ([0], [0, 1, 2, 3, 4])


FULL = """
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (9 << 20, 9 << 20))
for folder in (sys.argv[1], sys.argv[1] + "-fresh"):
    try:
        queue.snapshot(folder)
    except StorageError as error:
        print(error, flush=True)
print(table.find().rows.tolist(), flush=True)
queue.close()
"""


def test_a_save_that_fails_leaves_the_old_snapshot_and_nothing_partial(folder: Path) -> None:
    with child(folder, FULL) as process:
        old = {path.name: path.read_bytes() for path in folder.iterdir()}
        said, _ = process.communicate("\n", timeout=300)
    assert said.count("no snapshot was written to") == 2
    assert said.endswith("[0, 1, 2, 3, 4]\n")
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == old
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]
