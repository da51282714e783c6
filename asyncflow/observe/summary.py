"""The summary of a run: what was learned, how fast, who worked and who waited, and how old the tokens were."""

import json
import platform
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from asyncflow.observe.metrics import Metrics, Record
from asyncflow.storage.status import Counts


@dataclass(frozen=True, slots=True)
class Summary:
    """Result of a run; `values` is what `summary.json` holds."""

    folder: Path
    values: dict[str, Any]

    def __getitem__(self, key: str) -> Any:
        return self.values[key]

    def write(self) -> None:
        """Write `summary.json`."""
        partial = self.folder / "summary.partial"
        partial.write_text(json.dumps(self.values, indent=1) + "\n", encoding="utf-8")
        partial.replace(self.folder / "summary.json")


def summarise(
    folder: Path, metrics: Metrics, counts: Counts | None, *, seconds: float, since: int, complete: bool
) -> Summary:
    """Bring the records of a run together; speed is that of the steps after `since`, which took `seconds`."""
    steps, times = metrics.of("step"), metrics.times
    aged = [step for step in steps if "staleness_mean" in step]  # those of given answers have no age
    rows, tokens = (sum(step[key] for step in steps if step["step"] > since) for key in ("rows", "tokens"))
    values: dict[str, Any] = {
        "complete": complete,
        "steps": len(steps),
        "version": steps[-1]["version"] if steps else None,
        **_evaluations(metrics.of("eval")),
        **_ends("reward", "reward_mean", steps),
        **(_ends("nll", "nll", steps) if steps and "nll" in steps[0] else {}),
        "rows": rows,
        "rows_per_s": round(rows / seconds, 2) if seconds > 0 else None,
        "tokens_per_s": round(tokens / seconds, 1) if seconds > 0 else None,
        "train_seconds": round(seconds, 2),
        **{
            f"stage/{name}/{state}": round(share, 4)
            for name in times.stages
            for state, share in times.worst(name)[1].shares().items()
        },
        "replicas": times.per_second(),
        "bottleneck": times.bottleneck,
        "staleness/min": min((step["staleness_min"] for step in aged), default=None),
        "staleness/mean": sum(step["staleness_mean"] for step in aged) / len(aged) if aged else None,
        "staleness/max": max((step["staleness_max"] for step in aged), default=None),
        "ledger": msgspec.to_builtins(counts) if counts is not None else None,
        "python": platform.python_version(),
        "machine": platform.machine(),
    }
    return Summary(folder, values)


def _ends(name: str, key: str, steps: list[Record]) -> dict[str, Any]:
    """Return a metric of the first and of the last step; None where they have none."""
    first, last = (steps[0], steps[-1]) if steps else ({}, {})
    return {f"{name}/first": first.get(key), f"{name}/last": last.get(key)}


def _evaluations(records: list[Record]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for record in records:
        several = [key for key in record if "@" in key and not key.endswith("@1")]  # of one sample accuracy says it all
        for key in ("accuracy", "reward_mean", *several):
            found[f"eval/{key}_{record['moment']}"] = record[key]
    return found
