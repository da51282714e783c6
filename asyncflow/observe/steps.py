"""One record for each optimizer step, made from the events of the stages."""

from dataclasses import dataclass, replace

from asyncflow.board import Board
from asyncflow.execute.messages import Stepped, Worked
from asyncflow.observe.metrics import Metrics


@dataclass(slots=True)
class StepLog:
    """Writes a step's record once the trainer's time on it is known too; told before the board is."""

    metrics: Metrics
    _stepped: Stepped | None = None
    _lost_before: int = 0

    def stepped(self, event: Stepped, board: Board) -> None:
        """Take the metrics of a step; those of a warm-up are complete."""
        if event.table == "train":
            lost = board.dropped["train"]
            self._stepped = replace(event, metrics={**event.metrics, "rows_dropped": lost - self._lost_before})
            self._lost_before = lost
        else:
            step = board.steps[event.table] + 1
            self.metrics.log(event.table, {"step": step, "version": event.version, **event.metrics})

    def worked(self, event: Worked, board: Board, steps_before: int) -> None:
        """Count a stage's time; the trainer's ends a step, numbered after those of the runs before this one."""
        self.metrics.worked(event)
        if event.stage == "train" and self._stepped is not None:
            made, self._stepped = self._stepped, None
            step = board.steps["train"] + steps_before
            self.metrics.log("step", {"step": step, "version": made.version, **made.metrics})
