"""One record for each optimizer step, made from the events of the stages."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from asyncflow.board import TRAINER, Board
from asyncflow.execute.messages import Metric, Stepped, Worked
from asyncflow.observe.metrics import Metrics
from asyncflow.rewards.outcome import UNUSUAL


@dataclass(slots=True)
class StepLog:
    """Writes a step's record once the trainer's time on it is known too; told before the board is."""

    metrics: Metrics
    before: dict[str, int] = field(default_factory=dict)
    """Steps by table that the checkpoint has, of which this run goes on."""
    supervised: bool = False
    """Whether steps are made of given answers: nothing was generated for them, or dropped."""
    _stepped: Stepped | None = None
    _reasons_before: Counter[str] = field(default_factory=Counter)
    _lengths_before: Counter[int] = field(default_factory=Counter)
    _given_up_before: int = 0

    def stepped(self, event: Stepped, board: Board) -> None:
        """Take the metrics of a step; those of a supervised one are complete."""
        if event.table == "train" and self.supervised:
            self._stepped = event
        elif event.table == "train":
            with board.changed:
                reasons = Counter(board.reasons)
            left, self._reasons_before = reasons - self._reasons_before, reasons
            more = {**self._dropped(event, board, left), **self._weights(event, board), **_outcomes(event, left)}
            self._stepped = replace(event, metrics={**event.metrics, **more})
        else:
            self._log(event.table, event, board)

    def worked(self, event: Worked, board: Board) -> None:
        """Count a stage's time; the trainer's ends a step."""
        self.metrics.worked(event)
        if event.stage == "train" and event.replica == TRAINER and self._stepped is not None:
            made, self._stepped = self._stepped, None
            self._log("step", made, board)

    def _dropped(self, event: Stepped, board: Board, left: Counter[str]) -> dict[str, Metric]:
        """What has left since the last step without being trained, why, and whether it was longer than the rest."""
        with board.changed:
            lengths = Counter(board.dropped_lengths)
        gone, self._lengths_before = lengths - self._lengths_before, lengths
        trained = event.rows
        tokens = round(trained * _number(event.metrics, "response_tokens_mean"))
        rows, dropped = gone.total(), sum(length * count for length, count in gone.items())
        return {
            "rows_dropped": left.total(),
            "dropped": dict(sorted(left.items())),
            "dropped_response_tokens_mean": dropped / rows if rows else 0.0,
            "generated_response_tokens_mean": (tokens + dropped) / max(1, trained + rows),
        }

    def _weights(self, event: Stepped, board: Board) -> dict[str, int]:
        """How far engines trail the weights that the step began with, and how often one gave up a version."""
        given_up, self._given_up_before = board.times_given_up - self._given_up_before, board.times_given_up
        # One that is being started again has none, and gets the newest. Others may have the version that the step made
        # before the step is heard of.
        slowest = min((board.applied[name] for name in board.engines if name in board.applied), default=event.version)
        return {"publish_lag_max": max(0, event.version - 1 - slowest), "weights_given_up": given_up}

    def _log(self, kind: str, event: Stepped, board: Board) -> None:
        step = self.before.get(event.table, 0) + board.steps[event.table]
        if kind != "step":  # told before the board counts it; a step of the trainer is logged after that
            step += 1
        self.metrics.log(kind, {"step": step, "version": event.version, **event.metrics})


def _outcomes(event: Stepped, left: Mapping[str, int]) -> dict[str, int]:
    """How scoring ended that gave no score: of the rows that were trained all the same, and of those that left."""
    keys = [f"reward_{outcome}" for outcome in UNUSUAL]
    return {key: int(_number(event.metrics, key)) + left.get(key, 0) for key in keys}


def _number(metrics: Mapping[str, Metric], name: str) -> float:
    value = metrics.get(name, 0.0)
    return value if isinstance(value, int | float) else 0.0
