"""How a task consumes a table, and what its sampler chooses by."""

from dataclasses import dataclass
from typing import Literal, TypeAlias

import msgspec

from asyncflow.errors import SchemaError

Trait: TypeAlias = tuple[Literal["tokens", "version", "priority"], str]
"""A number about each row, and the column that it is taken from."""


class Choice(msgspec.Struct, frozen=True):
    """What a sampler chooses by; an option that a sampler does not use is refused."""

    tokens: tuple[str, ...] = ()
    """Columns whose lengths add up to the tokens of a row; an integer column counts by its value."""
    version: str = ""
    """Column of the versions of a row, of which the oldest counts."""
    priority: str = ""
    """Column of the priority of a row."""
    budget: int = 0
    """Tokens of one micro-batch."""
    uses: int = 1
    """How often a row is handed out and done in all."""
    max_age: int | None = None
    """The most versions by which a row that is used again trails the newest one seen."""
    share: float = 0.5
    """The largest share of a batch that is made of rows used before."""
    seed: int = 0
    ordered: bool = False
    """Whether the groups of a step are the first that were admitted, and none is passed over."""

    @property
    def traits(self) -> tuple[Trait, ...]:
        """The numbers about each row that it needs."""
        single: tuple[Trait, ...] = (("version", self.version), ("priority", self.priority))
        return (*(("tokens", name) for name in self.tokens), *(trait for trait in single if trait[1]))

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that it looks at: a row is ready only when they are written."""
        return tuple(name for _, name in self.traits)


PLAIN = Choice()

# What each sampler takes, with what it cannot do without.
_TAKES: dict[str, tuple[set[str], set[str]]] = {
    "fifo": (set(), set()),
    "group": (set(), set()),
    "ordered": (set(), set()),
    "token_balanced": ({"tokens", "budget", "ordered"}, {"tokens", "budget"}),
    "freshest": ({"version"}, {"version"}),
    "priority": ({"priority"}, {"priority"}),
    "replay": ({"uses", "version", "max_age", "share", "seed"}, {"uses"}),
}
SAMPLERS = tuple(_TAKES)


@dataclass(frozen=True, slots=True)
class TaskSpec:
    """How a task consumes a table."""

    reads: tuple[str, ...]
    sampler: str = "fifo"
    max_attempts: int = 3
    lease_seconds: float = 600.0
    durable: bool = False
    choice: Choice = PLAIN
    repairs: bool = False
    """Whether it gets only rows whose cells were lost, to write them anew; all others are done from the start."""

    @property
    def needs(self) -> tuple[str, ...]:
        """The columns that a row has when it is ready."""
        return (*self.reads, *self.choice.columns)

    def check(self, name: str) -> None:
        """Refuse settings that make no sense."""
        if self.sampler not in SAMPLERS:
            raise SchemaError(f"task {name!r}: no sampler {self.sampler!r}; there are {', '.join(SAMPLERS)}")
        if self.max_attempts < 1 or not self.lease_seconds > 0:
            raise SchemaError(f"task {name!r}: max_attempts and lease_seconds must be positive")
        if self.repairs and (self.needs or self.durable):
            raise SchemaError(
                f"task {name!r} repairs rows that have lost their cells: it reads none, and is not durable"
            )
        takes, needs = _TAKES[self.sampler]
        given = {field for field in Choice.__struct_fields__ if getattr(self.choice, field) != getattr(PLAIN, field)}
        for what, fields in (("does not use", given - takes), ("needs", needs - given)):
            if fields:
                raise SchemaError(f"task {name!r}: sampler {self.sampler!r} {what} {', '.join(sorted(fields))}")
        _check_numbers(name, self.choice)


def _check_numbers(name: str, choice: Choice) -> None:
    """Refuse numbers out of their range."""
    if choice.budget < 0 or choice.uses < 1 or (choice.max_age or 0) < 0 or choice.seed < 0:
        raise SchemaError(f"task {name!r}: budget and uses are positive, max_age and seed not negative: {choice}")
    if not 0 < choice.share < 1:
        raise SchemaError(f"task {name!r}: share lies between 0 and 1, not at {choice.share}")
    if choice.max_age is not None and not choice.version:
        raise SchemaError(f"task {name!r}: max_age needs the column of the version")
