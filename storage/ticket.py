"""A request that waits for its answer, and the answer: a reply, its cells, or an error.

Cells may be answered by where they lie (`Cells`): they are gathered by whoever takes the answer, outside of the
controller's lock, so that a large batch delays nobody else.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from asyncflow.errors import StorageError
from asyncflow.storage import wire
from asyncflow.storage.batch import Batch
from asyncflow.storage.intake import Arrival


class Found(Protocol):
    """Cells that are known by where they lie."""

    def gather(self) -> Batch:
        """Return them as a batch."""


Outcome: TypeAlias = tuple[wire.Reply, Batch | Found | None] | StorageError
Answer: TypeAlias = Callable[[Outcome], None]


@dataclass(slots=True, eq=False)
class Ticket:
    """A request that has not been answered; `answer` is called exactly once."""

    session: int
    request: wire.Request
    answer: Answer
    batch: Batch | None = None
    intake: Arrival | None = None
    open: bool = True
    since: float = 0.0
    """When it was asked, by the controller's clock."""

    def settle(self, outcome: Outcome) -> None:
        """Answer the request, unless it was answered before."""
        if self.open:
            self.open = False
            answer, self.answer = self.answer, _over
            # The one who waits may hold this to cancel it: without an end to that circle cells would wait for the
            # garbage collector, which does not see how large they are.
            self.batch = self.intake = None
            answer(outcome)


def _over(outcome: Outcome) -> None:
    """Stand in for the answer of a request that was answered."""


def gathered(content: Batch | Found | None) -> Batch | None:
    """Return the batch of an answer; this is where its cells are copied, if they are."""
    return content if content is None or isinstance(content, Batch) else content.gather()
