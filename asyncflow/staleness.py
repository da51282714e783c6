"""Who may start and what may be trained: one definition of staleness, two gates. Pure: no clock, no socket.

Staleness of a row is the version being trained minus the oldest version among its trained tokens, measured when
the row is consumed. Admission counts groups, since a step is made of whole groups: at trained version v at most
`(v - first + bound + 1) * groups_per_step` groups may have been admitted, not counting those that were lost on
the way (all rows dropped), which are given back and replaced; and never more than the steps of the run need.
Admission only paces; `check` is the guarantee.
"""

from dataclasses import dataclass, field

import numpy as np

from asyncflow.errors import StalenessExceeded
from asyncflow.storage.batch import Column
from asyncflow.types import Int64s, RowIds, Version


@dataclass(slots=True)
class StalenessController:
    """Paces the admission of groups; `first` is the version that training starts (or resumes) from."""

    groups_per_step: int
    steps: int
    bound: int = 0
    first: Version = 0
    version: Version = field(init=False)
    admitted: int = field(default=0, init=False)
    given_back: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self.version = self.first

    def room(self) -> int:
        """Groups that may be admitted now."""
        started = min(self.version - self.first + self.bound + 1, self.steps)
        allowed = started * self.groups_per_step
        return max(0, allowed - self.admitted + self.given_back)

    def admit(self, groups: int) -> None:
        """Count groups in; refuse more than there is room for (StalenessExceeded)."""
        if groups > self.room():
            raise StalenessExceeded(f"{groups} groups were to be admitted, but there is room for {self.room()}")
        self.admitted += groups

    def give_back(self, groups: int) -> None:
        """Count groups out that were lost before they were trained."""
        self.given_back += groups

    def trained(self, version: Version) -> None:
        """Advance to the version after an optimizer step; versions only grow."""
        self.version = max(self.version, version)


def staleness(versions: Column, mask: Column, training: Version) -> Int64s:
    """Return the staleness of each row (N,): `training` minus its oldest trained version; 0 without a trained token.

    `versions` holds one integer and `mask` one 0 or 1 for each response token. Tokens under the mask, prompt and
    tool tokens among them, cannot influence it.
    """
    rows = len(versions)
    oldest = np.full(rows, training, dtype=np.int64)
    trained = mask.values.astype(bool)
    owner = np.repeat(np.arange(rows), versions.lengths)
    np.minimum.at(oldest, owner[trained], versions.values[trained].astype(np.int64))
    result: Int64s = training - oldest
    return result


def check(rows: RowIds, ages: Int64s, bound: int) -> None:
    """Refuse rows older than the bound (StalenessExceeded): exactly `bound` is allowed."""
    late = np.flatnonzero(ages > bound)
    if late.size:
        row, age = rows[late[0]], ages[late[0]]
        raise StalenessExceeded(
            f"row {row} is {age} versions old and max_staleness is {bound} ({late.size} of {rows.size} rows are late)"
        )
