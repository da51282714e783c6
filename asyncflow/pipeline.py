"""Stages by the columns that they read and write, and the graph that follows from it.

Nobody writes the graph down: a stage stands after the writers of what it reads. What does not form a graph is
refused here, before anything starts. Pure: no stage is loaded, nothing runs.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from graphlib import CycleError, TopologicalSorter
from typing import Any

from asyncflow.errors import PipelineError

IDENTITY = ("source", "prompt_id", "group_id", "rollout_id", "segment", "row")
"""Columns that every row has from its admission; `row` is its key, which the stage loop adds."""


_UNBOUNDED = 2**40
_ENDLESS = 2**31 - 1
"""Attempts of a task that may not drop rows: its replica's failures end the run first."""


@dataclass(frozen=True, slots=True)
class Take:
    """How many rows a stage gets at a time."""

    rows: int | None = None
    """Rows of a batch; None: all that `whole` releases."""
    groups: int | None = None
    """Instead of rows: whole groups."""
    whole: bool = False
    """Hold back until every live row is ready: a phase waits for the whole phase before it."""
    partial: bool = False
    """Fewer rows will do, as soon as there is one."""
    ordered: bool = False
    """Groups come in the order of their admission: one that is not ready holds back those after it."""

    @property
    def sampler(self) -> str:
        """The sampler that serves this."""
        return "ordered" if self.ordered else "group" if self.groups else "fifo"


@dataclass(frozen=True, slots=True)
class StageSpec:
    """A stage as the graph and the executor see it."""

    name: str
    reads: tuple[str, ...]
    writes: Mapping[str, str] = field(default_factory=dict)
    """Column to dtype."""
    build: str = ""
    """Import path of the class or function behind it."""
    options: Mapping[str, object] = field(default_factory=dict)
    table: str = "train"
    host: str | None = None
    """Name of the process that runs it; stages of one host share its engine. None: a thread of the main process."""
    replicas: int = 1
    take: Take = Take()
    durable: bool = False
    """Rows stay until the stage commits them: the trainer's two-level acknowledgement."""
    lanes: int = 1
    """How many batches a replica works on at once, each in a thread of its own."""
    paced: bool = True
    """Whether lanes wait until the stage has room for their next batch; else whoever puts the rows sees to it."""
    gathers: bool = False
    """Batches stay leased until the stage says that it is done with all of them."""
    ranks: int = 1
    """Replicas among which the rows of each batch are shared out, balanced by tokens."""
    drops: bool = True
    """Whether rows may end here, at its wish or after too many failures; no training waits for a stage that may not."""

    @property
    def sampling(self) -> dict[str, Any]:
        """How its task is declared."""
        attempts = {} if self.drops else {"max_attempts": _ENDLESS}
        if self.ranks == 1:
            return {"sampler": self.take.sampler, **attempts}
        # One share for each rank: the engine cuts it, under its own budget, which counts padding.
        tokens = tuple(column for column in ("prompt_tokens", "response_tokens") if column in self.reads)
        shares = {"tokens": tokens, "budget": _UNBOUNDED, "ordered": self.take.ordered}
        return {"sampler": "token_balanced", **shares, **attempts}


@dataclass(frozen=True, slots=True)
class Graph:
    """Stages in an order in which each stands after the writers of what it reads."""

    stages: tuple[StageSpec, ...]
    edges: tuple[tuple[str, str, tuple[str, ...]], ...]
    """(writer, reader, columns)."""
    columns: Mapping[str, str]
    """Every column that is written, with its dtype."""


def graph(stages: Sequence[StageSpec]) -> Graph:
    """Derive the graph of one table's stages, or raise PipelineError with every fault found."""
    problems = _duplicates(stages)
    writers: dict[str, str] = {}
    for stage in stages:
        for column in stage.writes:
            if column in IDENTITY:
                problems.append(f"stage {stage.name} writes the identity column {column}: choose another name")
            elif column in writers:
                problems.append(f"column {column} has two writers: {writers[column]} and {stage.name}; rename one")
            else:
                writers[column] = stage.name
    problems += _unwritten(stages, writers)
    edges = _edges(stages, writers)
    order = _order(stages, edges, problems)
    if problems:
        raise PipelineError("\n".join(problems))
    by_name = {stage.name: stage for stage in stages}
    columns = {column: dtype for stage in stages for column, dtype in stage.writes.items()}
    return Graph(tuple(by_name[name] for name in order), edges, columns)


def awaited(stages: Sequence[StageSpec], name: str) -> frozenset[str]:
    """Return the stages of one table that a row has been through before this one gets it."""
    writers = {column: stage.name for stage in stages for column in stage.writes}
    edges = _edges(stages, writers)
    found: set[str] = set()
    new = {name}
    while new:
        new = {writer for writer, reader, _ in edges if reader in new} - found
        found |= new
    return frozenset(found)


def _duplicates(stages: Sequence[StageSpec]) -> list[str]:
    names = [stage.name for stage in stages]
    return [f"two stages are called {name}: rename one" for name in sorted({n for n in names if names.count(n) > 1})]


def _unwritten(stages: Sequence[StageSpec], writers: Mapping[str, str]) -> list[str]:
    there = ", ".join(sorted(writers))
    return [
        f"stage {stage.name} reads column {column}, which no stage writes; there are {there}"
        for stage in stages
        for column in stage.reads
        if column not in writers and column not in IDENTITY
    ]


def _edges(stages: Sequence[StageSpec], writers: Mapping[str, str]) -> tuple[tuple[str, str, tuple[str, ...]], ...]:
    found: dict[tuple[str, str], list[str]] = {}
    for stage in stages:
        for column in stage.reads:
            if column in writers:
                found.setdefault((writers[column], stage.name), []).append(column)
    return tuple((writer, reader, tuple(columns)) for (writer, reader), columns in found.items())


def _order(
    stages: Sequence[StageSpec], edges: Sequence[tuple[str, str, tuple[str, ...]]], problems: list[str]
) -> list[str]:
    sorter: TopologicalSorter[str] = TopologicalSorter({stage.name: () for stage in stages})
    for writer, reader, _ in edges:
        sorter.add(reader, writer)
    try:
        return list(sorter.static_order())
    except CycleError as error:
        problems.append("stages wait for each other in a cycle: " + " → ".join(reversed(error.args[1])))
        return []
