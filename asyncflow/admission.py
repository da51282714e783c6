"""Which prompts begin next: as many as the bound allows, those first that are to be generated again.

Admission counts by the version that was trained last, but by none newer than an evaluation has engines keep; or, where
nothing may ever be too old, by the one that the slowest engine uses: what begins is then answered by weights that are
at least as new.
"""

from collections.abc import Callable
from dataclasses import dataclass

from asyncflow.board import Board
from asyncflow.config.model import Pipeline
from asyncflow.data.draws import Draw, Draws
from asyncflow.staleness import StalenessController
from asyncflow.types import Version


@dataclass(frozen=True, slots=True)
class Admission:
    """Paces one training phase, by what the board tells; `control.first` is the version that it begins with."""

    config: Pipeline
    board: Board
    draws: Draws
    control: StalenessController
    waiting: Callable[[], int]

    @classmethod
    def of(cls, config: Pipeline, board: Board, draws: Draws, steps: int, waiting: Callable[[], int]) -> "Admission":
        """Begin with the version that is published, for so many steps; `waiting` counts rows that wait for training."""
        bound, first = config.staleness, board.published
        control = StalenessController(config.prompts_per_step, steps, bound, first, config.run_ahead)
        return cls(config, board, draws, control, waiting)

    def take(self) -> list[Draw]:
        """Draw as many prompts as there is room for."""
        groups = self._room()
        self.control.admit(groups)
        return self.draws.take(groups)

    def hear(self, done: int) -> None:
        """Take over which groups have ended, and which version counts after so many steps."""
        ended = self.board.take_ended()
        self.draws.lose(ended.lost)
        self.draws.requeue(ended.requeued)
        self.draws.train(ended.trained)
        self.control.give_back(len(ended.lost) + len(ended.requeued))
        self.control.advance(self._pace(done))

    def has_news(self, done: int) -> bool:
        """Whether more than so many steps are through, or there may be room that there was not."""
        board = self.board
        return (
            board.logged > done
            or bool(board.ended.lost or board.ended.requeued)
            or self._pace(done) > self.control.version
            or self._room() > 0
        )

    def _room(self) -> int:
        if self.config.deterministic and self._under_way():
            return 0  # what comes for lost groups comes at once, whichever was lost first
        finished = 0 if self.config.run_ahead is None else self.waiting() // self.config.train.group_size
        return self.control.room(finished)

    def _under_way(self) -> bool:
        """Whether rows were admitted that are neither scored nor dropped."""
        board = self.board
        return board.served["advantage"] + board.dropped < self.control.admitted * self.config.train.group_size

    def _pace(self, done: int) -> Version:
        trained = self.control.first + done
        if self.config.staleness > 0 and self.config.on_stale != "wait":
            pinned = self.board.pinned
            return trained if pinned is None else min(trained, pinned)
        return min(trained, *(self.board.applied.get(name, -1) for name in self.board.engines))
