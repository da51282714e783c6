"""What a replica and the flow say to each other: commands down, events up. Plain data, no behaviour."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from asyncflow.types import Version

Metric: TypeAlias = float | Sequence[int] | Mapping[str, int]
"""A number of a step; or how many rows have the value 0, 1, 2 and so on, or the value of that name."""

REQUEUED = "requeued"
"""The reason for which a group is dropped that is to be generated anew."""


@dataclass(frozen=True, slots=True)
class Ready:
    """The replica has set up its stages and serves them."""


@dataclass(frozen=True, slots=True)
class Failed:
    """The replica ends with an error."""

    report: str
    final: bool = False
    """Whether it would only fail again: the run ends."""


@dataclass(frozen=True, slots=True)
class Finished:
    """The replica ends because its data ended or it was told to stop."""


@dataclass(frozen=True, slots=True)
class Worked:
    """A stage finished one batch; times in seconds, and together they are the time since the last batch."""

    table: str
    stage: str
    replica: str
    rows: int
    busy: float
    idle: float
    """Waiting for rows."""
    blocked: float
    """Waiting for the queue to take its columns."""
    started: float = 0.0
    """When it began to wait for these rows, by the monotonic clock of the host."""
    lane: int = 0
    """Which of the batches that the stage works on at once."""
    version: Version | None = None
    """The version that a step made with it."""
    waits: tuple[tuple[float, float], ...] = ()
    """When the longest waits for the queue began and ended."""


@dataclass(frozen=True, slots=True)
class Traced:
    """A replica has spent time on something beside its batches."""

    lane: str
    """What happens here happens one after another."""
    name: str
    started: float
    """By the monotonic clock of the host."""
    seconds: float
    facts: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Dropped:
    """Rows ended before they were trained; one group id for each row."""

    table: str
    stage: str
    reason: str
    groups: tuple[int, ...]
    rows: tuple[int, ...]
    lengths: tuple[int, ...] = ()
    """Response tokens of each row, where the rows have responses."""


@dataclass(frozen=True, slots=True)
class Scored:
    """A held-out response, by its row, which tells of whose prompt it is which sample."""

    row: int
    reward: float
    outcome: str
    """Of the scoring."""
    answer: str | None
    """What it says; None if there is no answer in it."""
    versions: tuple[Version, ...]
    """Which versions made its tokens."""


@dataclass(frozen=True, slots=True)
class Evaluated:
    """Held-out responses were scored."""

    responses: tuple[Scored, ...]


@dataclass(frozen=True, slots=True)
class Trouble:
    """The reward function gave no score for some responses, at least not at once."""

    detail: str = ""
    """What the last of them met, with the traceback of the function; empty if all of them were scored."""
    retried: int = 0
    """How often a response was scored again."""
    replaced: int = 0
    """Processes of the function that were killed or have ended, and others began in their place."""


@dataclass(frozen=True, slots=True)
class Stepped:
    """The trainer made an optimizer step on a table."""

    table: str
    version: Version
    metrics: Mapping[str, Metric]
    groups: tuple[int, ...] = ()
    """Ids of the groups that the step was made of."""
    rows: int = 0
    """How many rows these were."""


@dataclass(frozen=True, slots=True)
class Published:
    """A version of the weights is ready to be taken."""

    version: Version
    offer: bytes
    """Where it is, as the channel of the weights says it."""


@dataclass(frozen=True, slots=True)
class Staged:
    """An inference engine has this version beside the one in use, and applies it when it is its turn."""

    version: Version


@dataclass(frozen=True, slots=True)
class Applied:
    """An inference engine generates with this version from its next token on."""

    version: Version


@dataclass(frozen=True, slots=True)
class GaveUp:
    """An inference engine could not get this version, and goes on with the one that it has."""

    version: Version
    reason: str


@dataclass(frozen=True, slots=True)
class Copied:
    """The state of a checkpoint is copied; training may go on while it is written."""

    folder: str


@dataclass(frozen=True, slots=True)
class Saved:
    """A checkpoint is complete."""

    folder: str
    version: Version


Event = (
    Ready
    | Failed
    | Finished
    | Worked
    | Traced
    | Dropped
    | Evaluated
    | Trouble
    | Stepped
    | Published
    | Staged
    | Applied
    | GaveUp
    | Copied
    | Saved
)


@dataclass(frozen=True, slots=True)
class Publish:
    """Publish the current weights."""


@dataclass(frozen=True, slots=True)
class Apply:
    """Take this version of the weights and use it from the next token on."""

    version: Version
    offer: bytes
    """Where it is, as it was published."""


@dataclass(frozen=True, slots=True)
class Switch:
    """It is this engine's turn to apply the version that it has staged."""

    version: Version


@dataclass(frozen=True, slots=True)
class Retire:
    """Nobody needs weights that are older than this version."""

    version: Version


@dataclass(frozen=True, slots=True)
class Save:
    """Write a checkpoint into this folder."""

    folder: str
    progress: Mapping[str, object]
    """What the flow wants to find there again."""
    outstanding: tuple[tuple[int, int, int], ...] = ()
    """What was admitted and not trained, as far as the flow knows: group, prompt, and how often it was requeued."""
    final: bool = False
    """The run ends with it: work that is not finished is given up."""
    finished: str = ""
    """File with responses that are finished and not trained; it becomes part of the checkpoint."""


@dataclass(frozen=True, slots=True)
class Stop:
    """End soon: give up work that is not finished."""


Command = Publish | Apply | Switch | Retire | Save | Stop
