"""How scoring one response ends."""

from dataclasses import dataclass
from typing import Literal, TypeAlias

Status: TypeAlias = Literal["ok", "timeout", "error", "unscored"]
UNUSUAL: tuple[Status, ...] = ("timeout", "error", "unscored")


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one row."""

    status: Status
    value: float | None = None
    """The score; only with `ok`."""
    detail: str = ""
    """One line that says why there is no score."""
    traceback: str = ""
    """The whole traceback, if the function raised."""

    def __str__(self) -> str:
        return f"{self.status}: {self.traceback or self.detail}".rstrip()
