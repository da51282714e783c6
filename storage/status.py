"""What a queue tells of itself; looking never consumes."""

from typing import Literal

import msgspec


class Counts(msgspec.Struct, frozen=True):
    """The ledger of a table: `admitted = done + sum(dropped.values()) + live`."""

    admitted: int
    done: int
    """Rows that all tasks are done with."""
    dropped: dict[str, int]
    """Rows that were dropped, by reason."""
    live: int


class TaskCounts(msgspec.Struct, frozen=True):
    """The rows of a table as one task sees them."""

    waiting: int
    """Ready and not leased."""
    leased: int
    done: int
    """Acknowledged by this task so far, retired rows included."""
    blocked: int
    """Live, with columns missing that the task reads."""
    oldest_lease: float | None = None
    """Seconds since the oldest lease in force was given."""


class Wait(msgspec.Struct, frozen=True):
    """A request that waits: a consumer for rows, or a producer for room."""

    wanted: str
    seconds: float
    """How long it has waited."""
    client: int
    """Number of the session, the same for all waits of one process."""
    task: str | None = None
    """None for a producer."""
    consumer: str = ""
    """Name that the stream was opened with."""
    missing: list[str] = []
    """Columns that the oldest blocked rows of the task lack."""


class Holding(msgspec.Struct, frozen=True):
    """A lease in force."""

    task: str
    consumer: str
    """Name that the stream was opened with."""
    rows: int
    first: list[int]
    """The first few of them."""
    seconds: float
    """How long it has been held."""


class TableStatus(msgspec.Struct, frozen=True):
    """One table."""

    rows: int
    """Live rows."""
    bytes: int
    """Bytes of the cells, in memory and on the disk."""
    columns: dict[str, str]
    tasks: dict[str, TaskCounts]
    sealed: bool
    state: Literal["open", "draining", "drained"] = "open"
    """Draining is sealed with rows left, drained is sealed and empty."""
    max_rows: int | None = None
    max_bytes: int | None = None
    """Bounds admission: cells that are written to rows which are in already may exceed it."""
    waiting_puts: int = 0
    """Puts that are held back until there is room."""
    waits: list[Wait] = []
    """Who waits, first come first."""
    spilled: int = 0
    """Those of the bytes that are on the disk of the process that holds the queue."""
    holdings: list[Holding] = []
    """Leases in force, the oldest first."""


class MemoryStatus(msgspec.Struct, frozen=True):
    """The cells of one process that holds some under a limit of memory."""

    memory: int
    """Bytes in memory."""
    spilled: int
    """Bytes on the disk."""
    limit: int
    folder: str
    trouble: str = ""
    """Why nothing could be written to the disk when that was last tried."""


class QueueStatus(msgspec.Struct, frozen=True):
    """The whole queue."""

    tables: dict[str, TableStatus]
    streams: int
    """Open streams of all clients."""
    clients: int
    """Connected processes beside the one that holds the queue."""
    failed: str | None
    units: dict[str, int] = {}
    """Bytes of the cells that each storage unit holds, by its address."""
    memory: dict[str, MemoryStatus] = {}
    """Of each process that holds cells under a limit of memory: a unit by its address, "" the holder of the queue."""
