"""How well and how fast does the quickstart learn? Runs it with several seeds and reports the spread.

python -m benchmarks.quickstart [SEEDS]
"""

import sys
import tempfile
import time
from pathlib import Path

from asyncflow import Flow
from benchmarks import report

EXAMPLE = Path(__file__).parent.parent / "examples" / "quickstart.yaml"
KEYS = ("eval/accuracy_before", "eval/accuracy_after_warmup", "eval/accuracy_after", "rows_per_s", "train_seconds")


def once(seed: int, folder: Path) -> dict[str, float]:
    """Run the quickstart with a seed; its summary's figures, and the seconds from start to end."""
    started = time.monotonic()
    summary = Flow.from_yaml(EXAMPLE, f"seed={seed}", f"output.folder={folder / str(seed)}").start().wait()
    seconds = time.monotonic() - started
    return {**{key: summary[key] for key in KEYS if key in summary.values}, "seconds": round(seconds, 1)}


def main(seeds: int = 3) -> None:
    """Measure, print and write results/quickstart.json."""
    with tempfile.TemporaryDirectory() as folder:
        runs = {seed: once(seed, Path(folder)) for seed in range(seeds)}
    spreads = {key: report.spread([run[key] for run in runs.values()]) for key in runs[0]}
    path = report.write(
        "quickstart", "How well and how fast does the quickstart learn?", {"runs": runs, "spread": spreads}
    )
    print(path.read_text())


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
