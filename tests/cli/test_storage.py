"""The commands on a queue, with real processes."""

import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np
import pytest

from asyncflow.cli.storage import _age, _size
from asyncflow.storage import Schema, TransferQueue


def command(*arguments):
    return [sys.executable, "-m", "asyncflow", "storage", *arguments]


@contextmanager
def started(url, *options):
    with subprocess.Popen(command("start", "--url", url, *options), stdout=subprocess.PIPE, text=True) as process:
        yield process, process.stdout.readline().strip()
        process.kill()


def inspect(*arguments):
    done = subprocess.run(command("inspect", *arguments), capture_output=True, text=True, timeout=100)
    return done.returncode, done.stdout + done.stderr


@pytest.fixture
def url(tmp_path):
    return f"ipc://{tmp_path}/queue"


@pytest.fixture
def pool():
    with ThreadPoolExecutor(2) as threads:
        yield threads


def test_a_served_queue_takes_clients_and_ends_on_a_signal(url):
    for number in (signal.SIGTERM, signal.SIGINT):
        with started(url) as (process, address):
            assert address == url
            with TransferQueue.open(url) as queue:
                assert queue.create_table("t", Schema({"x": "int64"})).put({"x": [1]}).tolist() == [0]
            process.send_signal(number)
            assert process.wait(30) == 0


def test_a_killed_queue_is_served_again_from_its_folder(url, tmp_path):
    options = "--durability", "journal", "--folder", str(tmp_path / "journal")
    with started(url, *options), TransferQueue.open(url) as queue:
        queue.create_table("t", Schema({"x": "int64"})).put({"x": [7]})
    with started(url, *options), TransferQueue.open(url) as queue:
        assert queue.table("t").read([0], ["x"])["x"].array.tolist() == [7]


@pytest.mark.parametrize("options", [("--durability", "disk"), ("--durability", "fsync"), ("--folder", "x")])
def test_a_durability_that_cannot_be_is_refused(url, options):
    done = subprocess.run(command("start", "--url", url, *options), capture_output=True, text=True, timeout=100)
    assert done.returncode == 2
    assert "durability '" in done.stderr


@pytest.mark.parametrize("units", [(), ("--units", "1")])
def test_cells_above_the_limit_of_memory_are_on_the_disk(url, tmp_path, units):
    options = "--memory", "1MB", "--spill", str(tmp_path / "disk"), *units
    with started(url, *options) as (process, _), TransferQueue.open(url) as queue:
        table = queue.create_table("t", Schema({"x": "list<int64>"}))
        for number in range(20):
            table.put({"x": [np.full(20_000, number)]}, timeout=100)
        until(lambda: all(each.memory <= each.limit for each in queue.status().memory.values()))
        text = inspect(url)[1]
        assert f" MB in {tmp_path}/disk\n" in text, text
        assert "in memory (limit 1.0 MB), " in text
        assert table.read([3], ["x"])["x"][0].tolist() == [3] * 20_000
        process.terminate()
        assert process.wait(60) == 0
    assert list((tmp_path / "disk").iterdir()) == []


@pytest.mark.parametrize(
    ("options", "said"),
    [(("start", "--memory", "8GiB"), "needs a folder"), (("unit", "ipc://queue", "--memory", "much"), "no number of")],
)
def test_a_limit_of_memory_that_cannot_be_is_refused(url, options, said):
    done = subprocess.run(command(*options, "--url", url), capture_output=True, text=True, timeout=100)
    assert (done.returncode, said in done.stderr) == (2, True), done.stderr


def test_tcp_tells_the_port_that_it_got():
    with started("tcp://127.0.0.1:*") as (_, address), TransferQueue.open(address) as queue:
        assert int(address.rpartition(":")[2]) > 0
        assert queue.status().tables == {}


def test_what_is_looked_at_is_told(url, pool):
    with TransferQueue.open() as host:
        host.serve(url)
        table = host.create_table("train", Schema({"text": "string", "reward": "float32"}), max_rows=5)
        table.task("score", reads=("text",))
        table.task("learn", reads=("text", "reward"))
        table.put({"text": ["a", "b", "c", "d"]})
        lease = table.stream("score", rows=3).next()
        waits = [
            pool.submit(table.stream("learn", rows=2, consumer="trainer 0").next),
            pool.submit(table.put, {"text": ["e", "f"]}),
        ]
        until(lambda: len(table.status().waits) == 2)
        code, text = inspect(url)
        assert code == 0, text
        assert "queue " + url + ": 0 other clients, 2 streams" in text
        assert "table train: 4 rows, " in text
        assert "  task score  1 ready, 3 leased (oldest " in text
        assert "  task learn  0 ready, 0 leased, 0 done, 4 blocked\n" in text
        assert "trainer 0 (task learn) waits for 2 rows since " in text
        assert "; blocked rows lack reward\n" in text
        assert "(a put) waits for room for 2 rows and " in text
        lease.done()
        table.drop(np.arange(4), "test")
        table.write(waits[1].result(), {"reward": np.zeros(2, np.float32)})
        assert len(waits[0].result()) == 2
        table.seal()
        assert ", sealed\n" in inspect(url)[1]


def until(condition):
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_prometheus_reads_what_is_printed(url):
    with TransferQueue.open() as host:
        host.serve(url)
        host.create_table('a "b"', Schema({"x": "int64"})).task("t", reads=("x",))
        code, text = inspect(url, "--prometheus")
    assert code == 0, text
    assert '\nasyncflow_queue_task_waiting_rows{table="a \\"b\\"",task="t"} 0\n' in text
    assert "\nasyncflow_queue_clients 1\n" in text


@pytest.mark.parametrize(("url", "code", "message"), [("nothing", 2, "no address of a queue"), (None, 1, "nobody")])
def test_what_is_not_there_is_told_apart_from_what_is_no_address(url, code, message, tmp_path):
    found, text = inspect(url or f"ipc://{tmp_path}/none", "--timeout", "0.2")
    assert (found, message in text) == (code, True), text


def test_an_address_that_cannot_be_served_is_refused(tmp_path):
    done = subprocess.run(command("start", "--url", "tcp://0.0.0.0:1"), capture_output=True, text=True, timeout=100)
    assert (done.returncode, "it takes keys" in done.stderr) == (2, True)


def test_encryption_without_keys_is_refused():
    options = ("start", "--url", "tcp://127.0.0.1:*", "--encrypt-bulk")
    done = subprocess.run(command(*options), capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stdout) == (2, "")
    assert "--keys FOLDER" in done.stderr


def test_keys_are_written_once_and_let_another_host_in(tmp_path):
    keys = tmp_path / "keys"
    write = command("keys", str(keys))
    done = subprocess.run(write, capture_output=True, text=True, timeout=100)
    assert (done.returncode, f"{keys}/client: goes to hosts" in done.stdout) == (0, True), done.stderr
    assert subprocess.run([*write, "--client", "second"], capture_output=True, timeout=100).returncode == 0
    done = subprocess.run(write, capture_output=True, text=True, timeout=100)
    assert (done.returncode, "is there already" in done.stderr) == (2, True)
    with started("tcp://0.0.0.0:*", "--keys", str(keys)) as (_, address):
        assert inspect(address, "--keys", str(keys)) == (0, f"queue {address}: 0 other clients, 0 streams\nno tables\n")
        found, text = inspect(address)
        assert (found, "it takes keys" in text) == (2, True)


def test_an_empty_queue_has_no_tables(url):
    with TransferQueue.open() as host:
        host.serve(url)
        assert inspect(url) == (0, f"queue {url}: 0 other clients, 0 streams\nno tables\n")


def test_ages_and_sizes_are_easy_to_read():
    assert [_age(3.21), _age(125)] == ["3.2 s", "2 min 5 s"]
    assert [_size(999), _size(1_250_000), _size(5e12)] == ["999 bytes", "1.2 MB", "5000.0 GB"]
