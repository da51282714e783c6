"""Which prompts are under way: drawn in order, numbered over the whole run, and drawn again until they are trained.

The position of a run is the set of what was not trained, beside the state of the order. A group that was lost stays
outstanding until the next step is trained: a run that goes on from before then meets the same loss again.
"""

from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from asyncflow.data.order import Order
from asyncflow.errors import CheckpointError


class Draw(NamedTuple):
    """One prompt that is to become a group of responses."""

    group: int
    """Number of the group, never used again: what is drawn follows from it."""
    prompt: int
    """Place of the prompt among all."""
    requeued: int
    """How often the prompt was generated in vain, because the responses became too old."""


class Draws:
    """Takes prompts from an order, and knows which of them are not trained."""

    def __init__(self, order: Order) -> None:
        self._order = order
        self._next = 0
        self._again: deque[Draw] = deque()
        self._under_way: dict[int, Draw] = {}
        self._lost: list[int] = []

    def take(self, count: int) -> list[Draw]:
        """Draw so many prompts: first those that are to be generated again."""
        drawn = [self._again.popleft() for _ in range(min(count, len(self._again)))]
        for prompt in self._order.take(count - len(drawn)).tolist():
            drawn.append(self._new(prompt, 0))
        self._under_way.update((draw.group, draw) for draw in drawn)
        return drawn

    def _new(self, prompt: int, requeued: int) -> Draw:
        draw = Draw(self._next, prompt, requeued)
        self._next += 1
        return draw

    def train(self, groups: Iterable[int]) -> None:
        """Hear which groups were trained: they are done with, and so are those that were lost before."""
        trained = list(groups)
        if not trained:
            return
        for group in (*trained, *self._lost):
            self._under_way.pop(group, None)
        self._lost.clear()

    def lose(self, groups: Iterable[int]) -> None:
        """Hear which groups were lost; others are drawn for them."""
        self._lost.extend(groups)

    def keep(self, groups: Iterable[int]) -> None:
        """Hear that groups are under way already, which a run that goes on would draw again."""
        kept = set(groups)
        self._again = deque(draw for draw in self._again if draw.group not in kept)

    def requeue(self, groups: Iterable[int]) -> None:
        """Hear which groups were lost that are to be drawn again, under new numbers."""
        for group in groups:
            before = self._under_way.pop(group)
            again = self._new(before.prompt, before.requeued + 1)
            self._again.append(again)
            self._under_way[again.group] = again

    @property
    def outstanding(self) -> tuple[Draw, ...]:
        """What was drawn and not trained, in the order of its numbers."""
        return tuple(self._under_way[group] for group in sorted(self._under_way))

    def state(self) -> dict[str, Any]:
        """What `restore` needs beside what is outstanding."""
        return {"order": self._order.state(), "admitted": self._next}

    def restore(self, record: Mapping[str, Any]) -> None:
        """Go on from a checkpoint: what was outstanding is drawn first."""
        try:
            self._order.restore(record["order"])
            self._next = int(record["admitted"])
            self._again = deque(Draw(*map(int, draw)) for draw in record["outstanding"])
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"the checkpoint has no position to go on from: {error!r}") from error
        strange = [draw.prompt for draw in self._again if not 0 <= draw.prompt < self._order.size]
        if strange:
            raise CheckpointError(
                f"the checkpoint goes on with prompt {strange[0]}, and there are {self._order.size}: "
                "it is damaged, or the data are others than those it was made with"
            )
        self._under_way = {draw.group: draw for draw in self._again}
