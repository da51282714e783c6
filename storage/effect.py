"""What happens to a table, as values that can be recorded, and made again in the same order.

Effects are resolved: they name rows, leases and steps, never what was asked for. What follows from others, such as
rows that retire, is no effect of its own. The samplers choose by what happened before, so a lease is made again by
asking them again; the rows it names are what counts, should they choose otherwise.
"""

from typing import Protocol, TypeAlias

import msgspec

from asyncflow.storage.batch import Batch
from asyncflow.storage.sampler import Wish
from asyncflow.storage.spec import TaskSpec


class Made(msgspec.Struct, tag_field="kind", forbid_unknown_fields=True):
    """Base of all effects."""


class Created(Made, tag="created"):
    """The table began."""

    columns: dict[str, str]
    max_rows: int | None
    max_bytes: int | None


class Ended(Made, tag="ended"):
    """The table was dropped."""


class Widened(Made, tag="widened"):
    """It got columns."""

    columns: dict[str, str]


class Declared(Made, tag="declared"):
    """It got a task."""

    task: str
    spec: TaskSpec


class Admitted(Made, tag="admitted"):
    """Rows came in, from `first`: each of the batch so many times."""

    put_id: bytes
    repeat: int
    first: int


class Written(Made, tag="written"):
    """Rows got the cells of the batch."""

    rows: bytes


class Leased(Made, tag="leased"):
    """Rows were handed out; no lease is 0, which tells that a sampler gave up its plan for such a wish."""

    task: str
    wish: Wish
    lease: int
    rows: bytes


class Kept(Made, tag="kept"):
    """Rows are under a lease since before; a micro-batch names its step, number and rank."""

    task: str
    lease: int
    rows: bytes
    attempt: int
    part: tuple[int, int, int] | None


class Finished(Made, tag="finished"):
    """A lease was acknowledged."""

    lease: int
    step: int | None


class Returned(Made, tag="returned"):
    """A lease was given back, or taken."""

    lease: int
    counted: bool


class Recalled(Made, tag="recalled"):
    """All leases of all tables ended, since the process ended that gave them."""


class Committed(Made, tag="committed"):
    """A durable task let rows go."""

    task: str
    step: int


class Rewound(Made, tag="rewound"):
    """A durable task went back to a step."""

    task: str
    step: int


class Reset(Made, tag="reset"):
    """A task began anew."""

    task: str


class Dropped(Made, tag="dropped"):
    """Rows were dropped."""

    rows: bytes
    reason: str


class Sealed(Made, tag="sealed"):
    """No row comes any more."""


Effect: TypeAlias = (
    Created | Ended | Widened | Declared | Admitted | Written | Leased | Kept | Finished | Returned | Recalled
    | Committed | Rewound | Reset | Dropped | Sealed
)  # fmt: skip


class Scribe(Protocol):
    """Hears what happens to one table."""

    def ready(self) -> None:
        """Refuse with a StorageError if nothing can be recorded now."""

    def before(self, effect: Effect, batch: Batch | None = None) -> None:
        """Record what is about to happen; a StorageError says that it must not."""

    def after(self, effect: Effect) -> None:
        """Record what has happened; if that fails it is kept, to be recorded before anything else (StorageError)."""


class Silent:
    """Records nothing."""

    def ready(self) -> None:
        """Refuse nothing."""

    def before(self, effect: Effect, batch: Batch | None = None) -> None:
        """Do nothing."""

    def after(self, effect: Effect) -> None:
        """Do nothing."""


SILENT = Silent()
