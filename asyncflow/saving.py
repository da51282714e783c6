"""Checkpoints of a run: when all is finished that belongs to one, and that the trainer has written it.

The trainer copies its state between two steps and writes the copy in the background; the flow waits for the copy
alone, and for what is written only where the run ends with it. What is trained is committed in the queue once the
checkpoint is whole: until then it could be needed again.
"""

import logging
from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from asyncflow import checkpoint, finished
from asyncflow.board import TRAINER, Board
from asyncflow.config.model import Pipeline
from asyncflow.data.draws import Draws
from asyncflow.errors import AsyncflowError, CheckpointError, StorageError
from asyncflow.execute.messages import Command, Save, Saved, Stop
from asyncflow.pipeline import Graph
from asyncflow.storage.client import Table

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Saving:
    """Has the trainer save, and waits for what belongs to it."""

    config: Pipeline
    board: Board
    graph: Graph
    """Of the table `train`."""
    send: Callable[[str, Command], None]
    folder: Path
    """The run's folder."""
    table: Table = field(init=False)
    draws: Draws = field(init=False)
    _under_way: str | None = field(default=None, init=False)
    """The checkpoint that is being written."""

    def save(self, folder: Path, *, background: bool = False, final: bool = False, failing: bool = False) -> None:
        """Save into a folder, and return when the checkpoint is whole, or in the `background` when it is copied.

        `final` ends the trainer's work, `failing` asks for it though the run has failed. One that is still being
        written is waited for. Raises CheckpointError if the trainer ends before.
        """
        self._wait_written(final=final, failing=failing)
        folder.parent.mkdir(parents=True, exist_ok=True)
        outstanding = self.draws.outstanding  # what is trained meanwhile, the trainer takes out
        progress = {"seed": self.config.seed, **self.draws.state()}
        kept = self._finished(folder, [draw.group for draw in outstanding])
        self._under_way = str(folder)
        self.send(TRAINER, Save(str(folder), progress, outstanding, final=final, finished=kept))
        if background:
            self._wait("copied", self.board.copied, str(folder), final=final, failing=failing)
        else:
            self._wait_written(final=final, failing=failing)

    def _finished(self, folder: Path, groups: list[int]) -> str:
        """Write the responses that are finished into a file, for the checkpoint; "" if there are none to be had."""
        path = folder.with_name(f".{folder.name}.finished")
        path.unlink(missing_ok=True)  # of a run that was killed
        try:
            rows = finished.collect(self.table, self.graph, groups, self.config.train.group_size) if groups else None
        except StorageError as error:
            log.warning("responses that are finished are not kept: %s", error)
            return ""
        if rows is None:
            return ""
        finished.write(rows, path)
        return str(path)

    def saved(self, event: Saved) -> None:
        """Hear that a checkpoint is whole."""
        self.table.commit("train", event.version)
        checkpoint.prune(self.folder / "checkpoints", self.config.output.keep_checkpoints)

    def _wait_written(self, *, final: bool, failing: bool) -> None:
        if self._under_way is not None:
            self._wait("saved", self.board.saved, self._under_way, final=final, failing=failing)
            self._under_way = None

    def _wait(self, what: str, there: Container[str], folder: str, *, final: bool, failing: bool) -> None:
        board = self.board
        board.wait(
            lambda: folder in there or TRAINER in board.finished | board.failed,
            self.config.executor.start_timeout if failing else self.config.executor.wait_timeout,
            lambda: f"the trainer to have {what} {folder}",
            stopping=final,
            failing=failing,
        )
        if folder not in there:
            raise CheckpointError(f"the trainer ended before it had {what} {folder}")

    def drain(self) -> None:
        """Let every stage finish with the rows that are trained: nothing of them is done again after a checkpoint."""
        phased = self.config.phased
        names = [stage.name for stage in self.graph.stages if stage.build] if phased else self._sinks()

        def over() -> bool:
            # In phases every row is trained or dropped by now; otherwise some are ahead, and are done again.
            ledger = self.table.ledger()
            return self._done(names, ledger.admitted - sum(ledger.dropped.values()) if phased else self.board.trained)

        self.board.wait(over, self.config.executor.wait_timeout, lambda: "every stage to finish its last rows")

    def early(self) -> None:
        """Leave a checkpoint of what is trained, if there is a trainer to ask, and let nothing of it be missing."""
        sinks, board = self._sinks(), self.board
        kept = {*sinks, *(self._upstream(sinks) - self._upstream(["train"]))}  # trained rows have what the trainer read
        for name in board.replicas:
            # The other ranks of the trainer help it through the step at hand.
            if name.rpartition("-")[0] not in {"trainer", *kept}:
                self.send(name, Stop())
        if TRAINER in board.ready and TRAINER not in board.finished:
            self.save(self.folder / "checkpoint", final=True)
            for name in board.replicas:
                if name.startswith("trainer-") and name != TRAINER:
                    self.send(name, Stop())  # else they wait for the one that has ended
            board.wait(
                lambda: self._done(sinks, board.trained),
                self.config.executor.wait_timeout,
                lambda: f"{', '.join(sinks)} to finish the trained rows",
                stopping=True,
            )

    def what_is_left(self) -> None:
        """Leave a checkpoint of a run that failed, if anything was trained and all of the trainer lives."""
        board = self.board
        lives = TRAINER in board.ready - board.finished and not any(
            name.startswith("trainer-") for name in board.failed
        )
        try:
            if not lives:
                # One that is being written needs no more than the process that writes it.
                self._wait_written(final=True, failing=True)
                return
            if not board.steps.total():
                return
            self.save(self.folder / "checkpoint", final=True, failing=True)
        except AsyncflowError as error:
            log.warning("no checkpoint was saved: %s", error)

    def _done(self, stages: Iterable[str], rows: int) -> bool:
        """Whether each of these stages is done with so many rows; the queue knows, whatever replicas have told."""
        tasks = self.table.status().tasks
        return all(tasks[stage].done >= rows for stage in stages)

    def _sinks(self) -> list[str]:
        """Stages that only look at what is trained, step by step; one that takes whole phases would wait for more."""
        looking = (stage for stage in self.graph.stages if stage.build and not stage.writes)
        return [stage.name for stage in looking if not stage.durable and not stage.take.whole]

    def _upstream(self, names: Iterable[str]) -> set[str]:
        """Stages of the train table whose columns these read, or those read."""
        found: set[str] = set()
        waiting = list(names)
        while waiting:
            reader = waiting.pop()
            fresh = {writer for writer, other, _ in self.graph.edges if other == reader} - found
            found |= fresh
            waiting += fresh
        return found
