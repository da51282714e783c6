"""The status of a queue in the text format that Prometheus reads."""

from collections.abc import Iterable, Iterator
from typing import TypeAlias

from asyncflow.storage.status import QueueStatus

Sample: TypeAlias = tuple[dict[str, str], float]


def exposition(status: QueueStatus) -> str:
    """Return all gauges and counters, each with its help and type."""
    return "".join(f"{line}\n" for line in _lines(status))


def _lines(status: QueueStatus) -> Iterator[str]:
    tables = status.tables.items()
    tasks = [(name, task, counts) for name, table in tables for task, counts in table.tasks.items()]
    yield from _metric("clients", "gauge", "Connected processes beside the holder", [({}, status.clients)])
    yield from _metric("streams", "gauge", "Open streams", [({}, status.streams)])
    yield from _metric("failed", "gauge", "1 if the queue has failed", [({}, status.failed is not None)])
    yield from _metric("rows", "gauge", "Live rows", [({"table": name}, table.rows) for name, table in tables])
    yield from _metric("bytes", "gauge", "Bytes of cells", [({"table": name}, table.bytes) for name, table in tables])
    units = [({"unit": url}, float(held)) for url, held in status.units.items()]
    yield from _metric("unit_bytes", "gauge", "Bytes of cells that a storage unit holds", units)
    spilled = [({"table": name}, float(table.spilled)) for name, table in tables]
    yield from _metric("spilled_bytes", "gauge", "Bytes of cells on the disk of the holder", spilled)
    kept = [({"process": url or "holder"}, each) for url, each in status.memory.items()]
    for name, text in (("memory", "in memory"), ("spilled", "on disk"), ("limit", "that may be in memory")):
        samples = [(labels, float(getattr(each, name))) for labels, each in kept]
        yield from _metric(f"process_{name}_bytes", "gauge", f"Bytes of the cells of a process {text}", samples)
    trouble = [(labels, float(each.trouble != "")) for labels, each in kept]
    yield from _metric("process_spill_failing", "gauge", "1 if cells cannot be written to disk", trouble)
    sealed = [({"table": name}, float(table.sealed)) for name, table in tables]
    yield from _metric("sealed", "gauge", "1 if the table takes no new rows", sealed)
    for state, meaning in (("waiting", "ready, not leased"), ("leased", "leased"), ("blocked", "lack columns")):
        samples = [({"table": name, "task": task}, float(getattr(counts, state))) for name, task, counts in tasks]
        yield from _metric(f"task_{state}_rows", "gauge", f"Rows of a task: {meaning}", samples)
    done = [({"table": name, "task": task}, float(counts.done)) for name, task, counts in tasks]
    yield from _metric("task_done_rows_total", "counter", "Rows that the task has acknowledged", done)
    ages = [({"table": name, "task": task}, counts.oldest_lease or 0.0) for name, task, counts in tasks]
    yield from _metric("task_oldest_lease_seconds", "gauge", "Age of the oldest lease, 0 without one", ages)
    yield from _metric("longest_wait_seconds", "gauge", "Longest wait of a consumer or producer", _waits(status))


def _waits(status: QueueStatus) -> list[Sample]:
    longest: dict[tuple[str, str, str], float] = {}
    for name, table in status.tables.items():
        for wait in table.waits:
            key = name, wait.task or "", wait.consumer
            longest[key] = max(longest.get(key, 0.0), wait.seconds)
    return [(dict(zip(("table", "task", "consumer"), key, strict=True)), longest[key]) for key in longest]


def _metric(name: str, kind: str, text: str, samples: Iterable[Sample]) -> Iterator[str]:
    full = f"asyncflow_queue_{name}"
    yield f"# HELP {full} {text}."
    yield f"# TYPE {full} {kind}"
    for labels, value in samples:
        inner = ",".join(f'{label}="{_escaped(shown)}"' for label, shown in labels.items())
        yield f"{full}{{{inner}}} {float(value):g}" if inner else f"{full} {float(value):g}"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')
