"""Does every mode learn the quickstart's task, and under every bound?

python -m benchmarks.learning [--seeds N …] [--case CASE …] [--set KEY=VALUE …] [--output FOLDER]

Each run is added to the result as it ends, so that a measurement goes on where another has stopped; one that is there
is made again only if it is named by seed and case.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from asyncflow import Flow
from benchmarks import report
from benchmarks.quickstart import EXAMPLE

QUESTION = "Does every mode learn the quickstart's task, and under every bound?"
CASES = {
    "colocated": ["mode=colocated"],
    "separated": ["mode=separated"],
    "streaming": ["mode=streaming"],
    "async, 0": ["mode=async", "max_staleness=0"],
    "async, 1": ["mode=async", "max_staleness=1"],
    "async, 4": ["mode=async", "max_staleness=4"],
}
PAGE = Path(__file__).parent.parent / "docs" / "learning.md"
HEAD = """# What is learned in each mode

Made by `python -m benchmarks.learning` from [its result](../benchmarks/results/learning.json): the quickstart's task,
[examples/quickstart.yaml](../examples/quickstart.yaml), in each mode, with several seeds. A figure is the median over
the seeds, with the least and the greatest. `async, 4` is the mode `async` with `max_staleness: 4`; there is no
correction for what is off-policy. How fast the modes are is another question: runs of this table may have had other
work beside them, and two cores that take turns have nothing to overlap.

"""


def once(seed: int, chosen: Sequence[str], folder: Path) -> dict[str, Any]:
    """Run the quickstart with a seed and some settings; what was learned, how old it was, and how fast it went."""
    started = time.monotonic()
    flow = Flow.from_yaml(EXAMPLE, f"seed={seed}", f"output.folder={folder / 'run'}", *chosen).start()
    summary, steps = flow.wait(), flow.metrics.of("step")
    return {
        "accuracy": {record["moment"]: record["accuracy"] for record in flow.metrics.of("eval")},
        "reward": [round(step["reward_mean"], 4) for step in steps],
        "staleness_mean": summary["staleness/mean"],
        "staleness_max": summary["staleness/max"],
        "ledger": summary["ledger"],
        "rows_per_s": summary["rows_per_s"],
        "seconds": round(time.monotonic() - started, 1),
        "commit": report.circumstances()["commit"],
        "overrides": list(chosen),
    }


def page(found: Mapping[str, Any]) -> str:
    """Return the page for a result."""
    return HEAD + "".join(f"{line}\n" for line in _lines(found))


def _lines(found: Mapping[str, Any]) -> Iterator[str]:
    commits = sorted({run["commit"] for runs in found["runs"].values() for run in runs.values()})
    yield f"{found['cores']} cores of {found['cpu']}, Python {found['python']}, commit {', '.join(commits)}.\n"
    yield "| mode | seeds | after the warm-up | after GRPO | staleness, mean | oldest |"
    yield "|---|---|---|---|---|---|"
    for case, runs in found["runs"].items():
        own = list(runs.values())
        accuracy = [_shown([run["accuracy"][moment] for run in own], "%") for moment in ("after_warmup", "after")]
        oldest = max(run["staleness_max"] for run in own)
        mean = _shown([run["staleness_mean"] for run in own])
        yield f"| {case} | {len(own)} | {accuracy[0]} | {accuracy[1]} | {mean} | {oldest:.0f} |"
    yield "\n![Mean reward by step](../benchmarks/results/learning.png)"


def _shown(values: Sequence[float], unit: str = "") -> str:
    spread = {name: value * (100 if unit else 1) for name, value in report.spread(values).items()}
    return f"{spread['median']:.3g}{unit} ({spread['min']:.3g}–{spread['max']:.3g})"


def draw(found: Mapping[str, Any], path: Path) -> None:
    """Draw the mean reward by step, one line for each case: the mean over its seeds."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt
    import numpy as np

    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    for case, runs in found["runs"].items():
        curves = np.array([run["reward"] for run in runs.values()])
        steps = np.arange(1, curves.shape[1] + 1)
        axes.plot(steps, curves.mean(axis=0), label=f"{case} ({len(curves)} seeds)", linewidth=1.2)
    axes.set(xlabel="step", ylabel="mean reward", title="The quickstart's task in each mode")
    axes.legend(fontsize=8)
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main(arguments: Sequence[str] | None = None) -> Path:
    """Measure, print, and write results/learning.json, its plot and its page."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.learning", description=QUESTION)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--case", choices=CASES, nargs="+", default=list(CASES))
    parser.add_argument("--set", nargs="+", default=[], help="overrides of the quickstart", metavar="KEY=VALUE")
    parser.add_argument("--output", type=Path, default=report.RESULTS, help="folder of the results")
    options = parser.parse_args(arguments)
    path, named = options.output / "learning.json", "--case" in (sys.argv if arguments is None else arguments)
    runs: dict[str, dict[str, Any]] = json.loads(path.read_text())["runs"] if path.exists() else {}
    for seed in options.seeds:
        for case in options.case:
            if str(seed) in runs.get(case, {}) and not named:
                continue
            with tempfile.TemporaryDirectory() as folder:
                made = once(seed, [*CASES[case], *options.set], Path(folder))
            runs.setdefault(case, {})[str(seed)] = made
            print(f"{case}, seed {seed}: accuracy {made['accuracy']}, {made['seconds']} s", flush=True)
            ordered = {name: dict(sorted(runs[name].items())) for name in CASES if name in runs}
            path = report.write("learning", QUESTION, {"runs": ordered}, options.output)
    found = json.loads(path.read_text())
    draw(found, options.output / "learning.png")
    if options.output == report.RESULTS:
        PAGE.write_text(page(found))
    return path


if __name__ == "__main__":
    main()
