"""A storage unit that hangs holds up those who need it, as long as they like to wait, and nobody else."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asyncflow.errors import WaitTimeout
from asyncflow.storage import Schema, TransferQueue, aio, client, link, remote
from asyncflow.storage.controller import Controller
from asyncflow.storage.depot import Depot
from asyncflow.storage.link import EmbeddedLink
from asyncflow.storage.units import Units
from asyncflow.types import Int64s
from tests.storage import mortals
from tests.storage.mortals import PATIENCE, Mortal, Nursery

COLUMNS = {"x": "int64", "y": "int64"}


@pytest.fixture(scope="module")
def nursery(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nursery]:
    yield from mortals.nursery(tmp_path_factory.mktemp("nursery"))


class Half:
    """A queue with a unit that lives and one that is stopped, and a row on each."""

    def __init__(self, folder: Path, nursery: Nursery, stack: ExitStack) -> None:
        units = Units()
        host = stack.enter_context(TransferQueue(EmbeddedLink(Controller(units=units))))
        self.url = host.serve(f"ipc://{folder}/queue")
        self.stopped = nursery.start(mortals.unit, controller=self.url, url=f"ipc://{folder}/stopped")
        self.stopped.hear()
        with TransferQueue.open(self.url, PATIENCE) as queue:
            table = queue.create_table("t", Schema(COLUMNS))
            table.task("use", ("x",))
            self.there: Int64s = table.put({"x": [1]})
        stack.callback(Depot(self.url, f"ipc://{folder}/living", PATIENCE).close)
        with TransferQueue.open(self.url, PATIENCE) as queue:
            self.here: Int64s = queue.table("t").put({"x": [2]})
        self.stopped.stop()
        stack.callback(end, self.stopped)


def end(mortal: Mortal) -> None:
    mortal.kill()
    mortal.rest()


@pytest.fixture
def half(tmp_path: Path, nursery: Nursery) -> Iterator[Half]:
    with ExitStack() as stack:
        yield Half(tmp_path, nursery, stack)


@pytest.fixture(params=["blocking", "asyncio"])
def use(request: pytest.FixtureRequest, half: Half) -> Callable[..., Any]:
    """Calls a method of the table of a new client, of either kind, within a time in which nobody waits for a unit."""

    async def awaited(name: str, *arguments: Any, **options: Any) -> Any:
        async with await aio.connect(half.url, timeout=PATIENCE) as queue:
            found = getattr(await queue.table("t"), name)(*arguments, **options)
            if name == "stream":
                return await found.next(timeout=0.5)
            return await found

    def called(name: str, *arguments: Any, **options: Any) -> Any:
        if request.param == "asyncio":
            return asyncio.run(awaited(name, *arguments, **options))
        with TransferQueue.open(half.url, timeout=PATIENCE) as queue:
            found = getattr(queue.table("t"), name)(*arguments, **options)
            return found.next(timeout=0.5) if name == "stream" else found

    return called


def test_what_needs_another_unit_does_not_wait(half: Half, use: Callable[..., Any]) -> None:
    assert use("read", half.here, ["x"])["x"].array.tolist() == [2]
    use("write", half.here, {"y": [3]})
    rows = use("put", {"x": [4]})
    assert use("read", rows, ["x"])["x"].array.tolist() == [4]


def test_who_has_no_time_may_be_the_first_who_asks(half: Half) -> None:
    half.stopped.go_on()
    with TransferQueue.open(half.url, timeout=PATIENCE) as queue:
        rows = [queue.table("t").put({"x": [at]}, timeout=0) for at in range(2)]
        assert queue.table("t").read(np.concatenate(rows), ["x"])["x"].array.tolist() == [0, 1]


def test_what_needs_it_says_so(half: Half, use: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (client, aio):
        monkeypatch.setattr(module, "TIMEOUT", 0.5)
    silent = "storage unit 1 at ipc://.*/stopped does not answer: {} table 't' waited .* s for a connection"
    with pytest.raises(WaitTimeout, match=silent.format("cells of")):
        use("read", half.there, ["x"])
    with pytest.raises(WaitTimeout, match=silent.format("a write to")):
        use("write", half.there, {"y": [3]})
    with pytest.raises(WaitTimeout, match=silent.format("cells of")):
        use("stream", "use", rows=1)


@pytest.mark.parametrize("size", [1, 100_000])
@pytest.mark.parametrize("kind", ["blocking", "asyncio"])
def test_a_put_to_one_that_hangs_later_ends_in_time(
    half: Half, kind: str, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link, "GRACE", 1000.0)
    monkeypatch.setattr(remote, "GRACE", 1000.0)
    half.stopped.go_on()
    with TransferQueue.open(half.url, timeout=PATIENCE) as queue:
        table, cells = queue.table("t"), {"x": np.zeros(size, np.int64)}
        table.read(half.there, ["x"])
        half.stopped.stop()
        queue._link._roster.best = 1  # type: ignore[attr-defined]
        waiting = aio.AsyncTable(table).put(cells, timeout=0.3) if kind == "asyncio" else None
        with pytest.raises(WaitTimeout, match="/stopped, asked for a put to table 't', did not answer within"):
            asyncio.run(waiting) if waiting else table.put(cells, timeout=0.3)


def test_it_is_used_again_once_it_goes_on(half: Half) -> None:
    with TransferQueue.open(half.url, timeout=PATIENCE) as queue:
        table = queue.table("t")
        with pytest.raises(WaitTimeout):
            table.send_read(half.there, ["x"]).result(0.1)
        waiting = table.send_read(np.concatenate([half.there, half.here]), ["x"])
        half.stopped.go_on()
        batch = client.batch_of(waiting.result(PATIENCE))
        assert batch["x"].array.tolist() == [1, 2]
