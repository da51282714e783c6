"""Who may start and what may be trained: one definition of staleness, two gates. Pure: no clock, no socket.

Staleness of a token is the version being trained minus the version that produced it, that of a row the largest
among its trained tokens, measured when the row is consumed.

*Admission* counts groups, since a step is made of whole groups: at version v at most
`(v - first + bound + 1) * groups_per_step` groups may have been admitted, not counting those that were lost on the
way (all rows dropped, or sent back), which are replaced; and never more than the steps of the run need. This bounds
the average only: a response that takes long is overtaken by others.

*Consumption* is the guarantee (`gate`): what is older than the bound meets the policy.

- `mask`: its stale tokens leave the loss; the row stays in its group's baseline.
- `drop`: the row leaves, with a reason.
- `requeue`: its group is generated anew, a few times at most.
- `wait`: there is none, since groups are trained in the order of their admission, and admitted by the version that
  every engine uses: a group that n others were admitted before is trained by step n // groups_per_step, and no
  sooner than `bound` versions before that was it begun.
"""

from dataclasses import dataclass, field

import numpy as np

from asyncflow.errors import StalenessExceeded
from asyncflow.storage.batch import Column
from asyncflow.types import Int64s, RowIds, StalePolicy, Version


@dataclass(slots=True)
class StalenessController:
    """Paces the admission of groups; `first` is the version that training starts (or resumes) from."""

    groups_per_step: int
    steps: int
    bound: int = 0
    first: Version = 0
    run_ahead: int | None = None
    """Nothing is admitted while so many steps' worth of groups are finished and not trained; None: no such limit."""
    version: Version = field(init=False)
    """The version that admission counts by."""
    admitted: int = field(default=0, init=False)
    given_back: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self.version = self.first

    def room(self, finished: int = 0) -> int:
        """Groups that may be admitted now, while so many are finished and not trained."""
        if self.run_ahead is not None and finished >= self.run_ahead * self.groups_per_step:
            return 0
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

    def advance(self, version: Version) -> None:
        """Count by this version from now on; it only grows."""
        self.version = max(self.version, version)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What becomes of rows that are to be trained."""

    mask: Column
    """The response mask, without the tokens that leave the loss."""
    ages: Int64s
    """Staleness of each row (N,) of what is left in the mask."""
    stale: Int64s
    """Positions of the rows that may not be trained, or that lost tokens."""
    tokens: int
    """How many tokens left the loss."""


def gate(versions: Column, mask: Column, training: Version, bound: int, policy: StalePolicy) -> Verdict:
    """Judge rows by the version being trained; exactly `bound` is allowed.

    `versions` (integers) and `mask` (0 or 1) have one value for each response token. Where the policy is `wait`, a
    row beyond the bound is a fault of the engine, which `check` reports; with all others the mask of the verdict has
    no token that is too old.
    """
    trained = mask.values.astype(bool)
    late = trained & (training - versions.values.astype(np.int64) > bound)
    owner = np.repeat(np.arange(len(versions)), versions.lengths)
    stale = np.unique(owner[late])
    if policy == "wait" or not stale.size:
        return Verdict(mask, staleness(versions, mask, training), stale, 0)
    # A row that is dropped or begun anew is trained with none of its tokens, also those that are young enough.
    gone = late if policy == "mask" else trained & np.isin(owner, stale)
    assert mask.offsets is not None
    left = Column.ragged(np.where(gone, 0, mask.values).astype(mask.values.dtype), mask.offsets, mask.dtype)
    return Verdict(left, staleness(versions, left, training), stale, int(np.count_nonzero(gone)))


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


def waited(versions: Column, mask: Column, training: Version) -> Int64s:
    """Return how many versions each row (N,) has waited since its newest trained token; 0 without a trained token.

    The rest of its staleness came while it was generated. Arguments as those of `staleness`.
    """
    newest = np.full(len(versions), -1, dtype=np.int64)
    trained = mask.values.astype(bool)
    owner = np.repeat(np.arange(len(versions)), versions.lengths)
    np.maximum.at(newest, owner[trained], versions.values[trained].astype(np.int64))
    result: Int64s = np.where(newest < 0, 0, training - newest)
    return result


def check(rows: RowIds, ages: Int64s, bound: int) -> None:
    """Refuse rows older than the bound (StalenessExceeded): exactly `bound` is allowed."""
    late = np.flatnonzero(ages > bound)
    if late.size:
        row, age = rows[late[0]], ages[late[0]]
        raise StalenessExceeded(
            f"row {row} is {age} versions old and max_staleness is {bound} ({late.size} of {rows.size} rows are late)"
        )
