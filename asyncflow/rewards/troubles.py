"""What a run is told of a reward function in trouble: the first of each kind in the log, the last for an error."""

import logging
import threading
from collections import Counter
from collections.abc import Sequence

from asyncflow.errors import RewardError
from asyncflow.rewards.outcome import Outcome

log = logging.getLogger(__name__)


class Troubles:
    """Looks at every outcome; safe to call from many threads."""

    def __init__(self, most: int) -> None:
        """With `most` errors and nothing scored the function is taken for broken."""
        self._most = most
        self._counts: Counter[str] = Counter()
        self._told: set[tuple[str, str]] = set()
        self._replaced = 0
        self._lock = threading.Lock()

    def note(self, outcomes: Sequence[Outcome]) -> str:
        """Log the first of each kind; return the last, or an empty text if all were scored."""
        unusual = [outcome for outcome in outcomes if outcome.status != "ok"]
        with self._lock:
            self._counts.update(outcome.status for outcome in outcomes)
            for outcome in unusual:
                self._tell(outcome)
        return str(unusual[-1]) if unusual else ""

    def fresh(self, replaced: int) -> int:
        """Return how many of so many replaced workers nobody was told of yet."""
        with self._lock:
            fresh, self._replaced = replaced - self._replaced, replaced
        return fresh

    def check(self, last: str) -> None:
        """RewardError if not one response was scored, and as many errors were raised as a step has responses."""
        with self._lock:
            counts = Counter(self._counts)
        if not counts["ok"] and counts["error"] >= self._most:
            raise RewardError(f"not one response could be scored, and {counts['error']} ended with an error; {last}")

    def _tell(self, outcome: Outcome) -> None:
        """An error's kind is that of the exception."""
        kind = (outcome.status, outcome.detail.partition(":")[0])
        if kind not in self._told:
            self._told.add(kind)
            log.warning("a response was not scored (the next of this kind are only counted); %s", outcome)
