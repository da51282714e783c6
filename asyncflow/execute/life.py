"""One life of a replica, from its start to its end, as whoever watches it sees it.

What it says goes on to the flow at once, but for its failure: that is told when it has ended, so that another in its
place finds nobody there, or at once if there will be none.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeAlias

from asyncflow.execute.messages import Event, Failed, Finished, Ready
from asyncflow.execute.replica import Assignment
from asyncflow.execute.restarts import restartable

Report: TypeAlias = Callable[[str, Event], None]
"""Takes the name of a replica and what happened there."""
Fell: TypeAlias = Callable[[str, Failed], int]
"""Takes the name of a replica that has failed, and how; says how often in a row, if it is to begin again, else 0."""


@dataclass(slots=True)
class Life:
    """Hears what one replica says."""

    job: Assignment
    report: Report
    fell: Fell
    _ready: bool = field(default=False, init=False)
    _finished: bool = field(default=False, init=False)
    _failed: Failed | None = field(default=None, init=False)

    @property
    def patience(self) -> float | None:
        """Longest wait for what it says next; None where others know how long that may take."""
        executor = self.job.config.executor
        if self._failed is not None and restartable(self.job.specs):
            return executor.stop_timeout
        return executor.start_timeout if self.job.failures and not self._ready else None

    @property
    def awaited(self) -> str:
        """What that is."""
        return "get ready" if self._failed is None else "end"

    def take(self, event: Event) -> None:
        """Pass an event on; the first failure counts."""
        if not isinstance(event, Failed):
            self._ready |= isinstance(event, Ready)
            self._finished |= isinstance(event, Finished)
            self.report(self.job.name, event)
        elif self._failed is None:
            self._failed = event
            if self._last(event):
                self.fell(self.job.name, Failed(event.report, final=True))

    def ended(self, how: str, ending: bool) -> int:
        """Hear that it has ended; return how often it has failed, if it is to begin again, else 0."""
        if self._failed is not None and self._last(self._failed):
            return 0
        if self._failed is None and self._finished:
            return 0
        failed = self._failed or Failed(how)
        return self.fell(self.job.name, Failed(failed.report, failed.final or ending or self._last(failed)))

    def _last(self, failed: Failed) -> bool:
        return failed.final or not restartable(self.job.specs)
