"""One record for each optimizer step, made from the events of the stages."""

from collections import Counter
from dataclasses import dataclass, field, replace

from asyncflow.board import TRAINER, Board
from asyncflow.execute.messages import Stepped, Worked
from asyncflow.observe.metrics import Metrics
from asyncflow.rewards.outcome import UNUSUAL


@dataclass(slots=True)
class StepLog:
    """Writes a step's record once the trainer's time on it is known too; told before the board is."""

    metrics: Metrics
    before: dict[str, int] = field(default_factory=dict)
    """Steps by table that the checkpoint has, of which this run goes on."""
    _stepped: Stepped | None = None
    _lost_before: int = 0
    _given_up_before: int = 0
    _reasons_before: Counter[str] = field(default_factory=Counter)

    def stepped(self, event: Stepped, board: Board) -> None:
        """Take the metrics of a step; those of a warm-up are complete."""
        if event.table == "train":
            lost = board.dropped
            more = {"rows_dropped": lost - self._lost_before, **self._weights(event, board)}
            self._stepped = replace(event, metrics={**event.metrics, **more, **self._outcomes(event, board)})
            self._lost_before = lost
        else:
            self._log(event.table, event, board)

    def worked(self, event: Worked, board: Board) -> None:
        """Count a stage's time; the trainer's ends a step."""
        self.metrics.worked(event)
        if event.stage == "train" and event.replica == TRAINER and self._stepped is not None:
            made, self._stepped = self._stepped, None
            self._log("step", made, board)

    def _weights(self, event: Stepped, board: Board) -> dict[str, int]:
        """How far engines trail the weights that the step began with, and how often one gave up a version."""
        given_up, self._given_up_before = board.times_given_up - self._given_up_before, board.times_given_up
        slowest = min(board.applied.get(name, -1) for name in board.engines)
        # Engines may have the version that the step made before the step is heard of.
        return {"publish_lag_max": max(0, event.version - 1 - slowest), "weights_given_up": given_up}

    def _outcomes(self, event: Stepped, board: Board) -> dict[str, int]:
        """How scoring ended that gave no score: of the rows that were trained all the same, and of those that left."""
        left, self._reasons_before = board.reasons - self._reasons_before, Counter(board.reasons)
        keys = [f"reward_{outcome}" for outcome in UNUSUAL]
        return {key: int(event.metrics.get(key, 0)) + left[key] for key in keys}

    def _log(self, kind: str, event: Stepped, board: Board) -> None:
        step = self.before.get(event.table, 0) + board.steps[event.table]
        if kind != "step":  # told before the board counts it; a step of the trainer is logged after that
            step += 1
        self.metrics.log(kind, {"step": step, "version": event.version, **event.metrics})
