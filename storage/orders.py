"""Messages that make one queue of several storage units: who holds which row, and what a unit is to do.

A put goes to a unit, which keeps the cells and asks the controller to admit their rows (`Admit`). To read, a client
asks the controller, which tells the units concerned to hold those cells (`Hold`) and the client where they are
(`Places`); the client fetches them there (`Fetch`). What the controller tells a unit reaches it in order, answers
and orders alike: cells that are held were stored before, and are freed only afterwards.
"""

from typing import TypeAlias

import msgspec

from asyncflow.storage.message import Message
from asyncflow.storage.spec import Trait


class Measured(msgspec.Struct, forbid_unknown_fields=True):
    """A number about each row of a message that samplers choose by, packed as float64."""

    trait: Trait
    values: bytes


class Places(msgspec.Struct, forbid_unknown_fields=True):
    """The units that hold some rows, and for each row, as uint8, which of them; nothing if there is only one."""

    units: list[int]
    at: bytes = b""


# What a unit asks the controller


class Attach(Message, tag="attach"):
    """First message of a unit, which serves clients at `url`; answered by orders for as long as it lives."""

    url: str


class Admit(Message, tag="admit"):
    """Admit rows whose cells the unit has; waits for room."""

    table: str
    put_id: bytes
    rows: int
    size: int
    """Bytes of the cells."""
    columns: list[str]
    groups: bytes | None = None
    """Group of each row; without it each `repeat` rows are a new group."""
    repeat: int = 1
    traits: tuple[Measured, ...] = ()


class Written(Message, tag="written"):
    """The unit has cells for some rows of a write, which becomes visible once all its parts are there."""

    table: str
    rows: bytes
    columns: list[str]
    fresh: bytes
    """Presence bits of each row, as uint64: the columns that the unit does not have yet."""
    write_id: bytes
    parts: int
    size: int
    """Bytes of the cells."""
    lease: int | None = None
    traits: tuple[Measured, ...] = ()


class Freed(Message, tag="freed"):
    """The unit has done the next order to free rows of a table, and holds so many bytes less."""

    table: str
    size: int
    """Bytes of the cells."""


class Grown(Message, tag="grown"):
    """The unit holds so many bytes more of a table, or less."""

    table: str
    size: int


class Spilled(Message, tag="spilled"):
    """The unit has so many bytes on its disk, and all others within a limit of memory."""

    size: int
    limit: int
    folder: str
    trouble: str
    """Why nothing could be written when that was last tried."""


class Mirrored(Message, tag="mirrored"):
    """Another unit, too, has these columns of rows of this one; none, if it has refused them."""

    table: str
    rows: bytes
    columns: list[str]
    unit: int


# What a client asks the controller


class AskUnits(Message, tag="units"):
    """Ask where the units are."""


class Locate(Message, tag="locate"):
    """Ask which units hold some rows."""

    table: str
    rows: bytes


class Watch(Message, tag="watch"):
    """Have a trait kept from now on; answered by the rows of which it is not known."""

    table: str
    trait: Trait


class Note(Message, tag="note"):
    """Tell a trait of rows that were written before it was watched."""

    table: str
    rows: bytes
    told: Measured


# What a client asks a unit


class Fetch(Message, tag="fetch"):
    """Ask for cells that the controller has told the unit to hold."""

    hold: int


class Stage(Message, tag="stage"):
    """Add the cells of the batch to rows of the unit: one of the parts of a write."""

    table: str
    rows: bytes
    write_id: bytes
    parts: int
    lease: int | None = None


# What a controller asks a unit, as any client does


class Take(Message, tag="take"):
    """Ask for a block of a cut of a table, counted from 0; answered by `End` after the last."""

    cut: int
    table: str
    number: int


class Load(Message, tag="load"):
    """Keep the batch for rows that are admitted, each at its place; the table is made if it is new."""

    shape: "Shape"
    stop: int
    """The row after the last of the table."""
    rows: bytes
    places: bytes
    copy: bool = False
    """Whether they are another unit's, kept in case that it dies."""


# Answers


class Taken(Message, tag="taken"):
    """A block: its rows, the place of each in the batch, and how many of them have gone."""

    rows: bytes
    places: bytes
    dead: int


class Admitted(Message, tag="admitted"):
    """Row and group ids of a put; `known` is one that was admitted before. The next one best goes to `unit`.

    A `mirror` is the unit that must have the rows, too, before the client is told.
    """

    rows: bytes
    groups: bytes
    known: bool
    unit: int
    mirror: int = 0


class Entered(Message, tag="entered"):
    """A part of a write is visible; `mirrors` must have its cells, too, before the client is told (0: none)."""

    mirrors: Places


class Lacking(Message, tag="lacking"):
    """Nothing was done: ask again, with these traits too."""

    traits: list[Trait]


class Stale(Message, tag="stale"):
    """Nothing was done: some cells are written meanwhile. Compare, and ask again."""


class UnitList(Message, tag="unit_list"):
    """The address of each unit, and the one that the next put best goes to."""

    units: dict[int, str]
    next: int


class Placed(Message, tag="placed"):
    """Where the cells are that were asked for, and under which number they are held there."""

    hold: int
    places: Places


# Orders


class Hold(Message, tag="hold"):
    """Keep cells until a client fetches them, also if their rows go."""

    hold: int
    table: str
    rows: bytes
    columns: list[str]


class Unhold(Message, tag="unhold"):
    """Nobody will fetch these any more."""

    holds: list[int]


class Free(Message, tag="free"):
    """Rows have gone; every row below `base` has."""

    table: str
    rows: bytes
    base: int


class Shape(Message, tag="shape"):
    """A table has these columns, and these traits are told with its rows; one that is new begins with row `base`."""

    table: str
    columns: dict[str, str]
    base: int
    traits: list[Trait]


class Close(Message, tag="close"):
    """A table was dropped."""

    table: str


class Cut(Message, tag="cut"):
    """Keep all cells as they stand, to be taken, and let those of an earlier cut go; 0 is only the latter."""

    cut: int


class Adopt(Message, tag="adopt"):
    """Rows whose cells were lost are from now on on this unit: it makes their identity columns."""

    table: str
    rows: bytes
    identity: dict[str, bytes]


class Promote(Message, tag="promote"):
    """Rows of which this unit kept a copy are from now on on this unit."""

    table: str
    rows: bytes


class Copy(Message, tag="copy"):
    """Have another unit keep a copy of rows of this one."""

    table: str
    rows: bytes
    unit: int


Order: TypeAlias = Hold | Unhold | Free | Shape | Close | Cut | Adopt | Promote | Copy


class Orders(Message, tag="orders"):
    """What a unit is to do, in order."""

    orders: list[Order]


Question: TypeAlias = (
    Attach | Admit | Written | Freed | Grown | Mirrored | Spilled | AskUnits | Locate | Watch | Note | Fetch | Stage
    | Take | Load
)  # fmt: skip
Reply: TypeAlias = Admitted | Entered | Lacking | Stale | UnitList | Placed | Orders | Taken
