"""The public `transferqueue` at the same work, in an environment of its own.

Run by the interpreter that has it (`--peer` of `benchmarks.queue`); reads a JSON request a line from standard
input and answers each with a line. Its best case: one client, default settings, metadata polled without a pause,
its Ray told of more CPUs than there are, since it hangs with too few.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from itertools import count
from typing import Any

os.environ.setdefault("TQ_NUM_THREADS", "2")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

import numpy as np
import ray
import torch
from tensordict import TensorDict

from benchmarks.rows import Case, Rows

tq = import_module("transfer_queue")
TASKS = 8
STARTS = 4
POLL = 0.001
fresh = count()


def start() -> None:
    """Start Ray and the queue; Ray gives up on a busy machine and may be asked again."""
    for attempt in range(STARTS):
        try:
            ray.init(num_cpus=16, include_dashboard=False, log_to_driver=False)
            break
        except Exception:
            ray.shutdown()
            if attempt == STARTS - 1:
                raise
    tq.init(CONF)


CONF = import_module("omegaconf").OmegaConf.create({"controller": {"polling_mode": True}})


def tensors(rows: Rows) -> TensorDict:
    """Return rows as its users hold them."""
    columns, count = {}, 0
    for name, (values, bounds) in rows.items():
        flat = torch.from_numpy(values)
        count = len(values) if bounds is None else len(bounds) - 1
        if bounds is not None:
            flat = torch.nested.as_nested_tensor(list(flat.split(np.diff(bounds).tolist())), layout=torch.jagged)
        columns[name] = flat
    return TensorDict(columns, batch_size=count)


def timed(work: Callable[[], object]) -> tuple[float, Any]:
    """Return seconds and the result."""
    started = time.perf_counter()
    result = work()
    return time.perf_counter() - started, result


def take(client: Any, fields: list[str], rows: int, partition: str, task: str) -> Any:
    """Return metadata and data of the next rows; polls, since nothing else is offered."""
    while (meta := client.get_meta(fields, rows, partition, task_name=task)).size == 0:
        time.sleep(POLL)
    return meta, client.get_data(meta)


def batches(kind: str, rows: int, repeat: int) -> dict[str, list[float]]:
    """Put and get one batch several times; the values are compared once."""
    client, data, times = tq.get_client(), tensors(Case("", kind, rows).rows()), {"put": [], "get": []}
    names = list(data.keys())
    for number in range(repeat + 1):
        partition = f"batches {next(fresh)}"
        put, _ = timed(partial(client.put, data, partition_id=partition))
        get, (_, found) = timed(partial(take, client, names, rows, partition, "get"))
        if number == 0:  # warms up, and is the one that is compared
            assert all(same(data[name], found[name]) for name in names)
        else:
            times["put"].append(put)
            times["get"].append(get)
        client.clear_partition(partition)
    return times


def stored(kind: str, rows: int, repeat: int) -> dict[str, list[float]]:
    """Put and get the arrays of one batch as an object of Ray's store."""
    arrays = [array for column in Case("", kind, rows).rows().values() for array in column if array is not None]
    times: dict[str, list[float]] = {"put": [], "get": []}
    for number in range(repeat + 1):
        put, reference = timed(lambda: ray.put(arrays))
        get, found = timed(partial(ray.get, reference))
        if number == 0:
            assert all(map(np.array_equal, arrays, found))
        else:
            times["put"].append(put)
            times["get"].append(get)
        del reference, found
    return times


def same(before: torch.Tensor, after: torch.Tensor) -> bool:
    """Whether all cells are equal."""
    return all(torch.equal(*pair) for pair in zip(before.unbind(), after.unbind(), strict=True))


@ray.remote(num_cpus=0)
def produce(partition: str, rows: int, number: int, pause: float) -> list[float]:
    """Put batches one after another; return when each put began."""
    tq.init(CONF)
    data, began = tensors(Case("", "tokens", rows).rows()), []
    for _ in range(number):
        time.sleep(pause)
        began.append(time.perf_counter())
        tq.get_client().put(data, partition_id=partition)
    return began


def stream(rows: int, number: int, pause: float = 0.0) -> tuple[list[float], list[float]]:
    """Consume what another process puts; return when each put began, and when its data were there."""
    partition, client, arrived = f"stream {next(fresh)}", tq.get_client(), []
    putting = produce.remote(partition, rows, number, pause)
    for _ in range(number):
        take(client, list(Case("", "tokens", 1).rows()), rows, partition, "stream")
        arrived.append(time.perf_counter())
    client.clear_partition(partition)
    return ray.get(putting), arrived


def held(rows: int, batch: int, repeat: int) -> list[float]:
    """Seconds for a batch to go through eight tasks, with so many rows held."""
    client, partition = tq.get_client(), f"held {next(fresh)}"
    piece = TensorDict({"x": torch.arange(batch)}, batch_size=batch)
    client.put(TensorDict({"x": torch.arange(rows)}, batch_size=rows), partition_id=partition)
    times = [timed(lambda: through(client, piece, partition, batch))[0] for _ in range(repeat)]
    client.clear_partition(partition)
    return times


def through(client: Any, piece: TensorDict, partition: str, batch: int) -> None:
    """Put a batch, let each task have one, and clear one."""
    client.put(piece, partition_id=partition)
    for task in range(TASKS):
        meta, _ = take(client, ["x"], batch, partition, f"task {task}")
    client.clear_samples(meta)


def answer(request: dict[str, Any]) -> Any:
    """Do what is asked."""
    match request.pop("do"):
        case "batches":
            return batches(**request)
        case "stored":
            return stored(**request)
        case "stream":
            began, arrived = stream(**request)
            return request["rows"] * request["number"] / (arrived[-1] - began[0])
        case "latency":
            began, arrived = stream(1, request["number"], 0.05)
            return [after - before for before, after in zip(began, arrived, strict=True)]
        case "held":
            return held(**request)
        case other:
            raise ValueError(f"unknown request {other!r}")


def requests() -> Iterator[dict[str, Any]]:
    """Yield requests until the input ends."""
    for line in sys.stdin:
        yield json.loads(line)


def main() -> None:
    """Serve until the input ends; whatever the libraries print goes to standard error."""
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    start()
    out.write(json.dumps({"version": tq.__version__, "ray": ray.__version__, "torch": torch.__version__}) + "\n")
    for request in requests():
        out.write(json.dumps(answer(request)) + "\n")
    tq.close()
    ray.shutdown()


if __name__ == "__main__":
    main()
