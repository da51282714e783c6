"""Studies of what is learned: the quickstart's task under some settings, with several seeds each.

A study is a result, a plot of the mean reward by step, and a page of the docs. Each run is added to the result as it
ends, so that a measurement goes on where another has stopped; one that is there is made again only if it is named by
seed and case.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from asyncflow import Flow
from benchmarks import report
from benchmarks.quickstart import EXAMPLE

DOCS = Path(__file__).parent.parent / "docs"


@dataclass(frozen=True, slots=True)
class Study:
    """A question, and the settings of the quickstart that answer it."""

    name: str
    """Of the result, its plot and its page."""
    question: str
    title: str
    """Of the plot."""
    cases: Mapping[str, Sequence[str]]
    """Overrides by the name that a case has in the table."""
    head: str
    """How the page begins."""

    def main(self, arguments: Sequence[str] | None = None) -> Path:
        """Measure, print, and write the result, its plot and its page."""
        parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{self.name}", description=self.question)
        parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
        parser.add_argument("--case", choices=self.cases, nargs="+", default=list(self.cases))
        parser.add_argument("--set", nargs="+", default=[], help="overrides of the quickstart", metavar="KEY=VALUE")
        parser.add_argument("--output", type=Path, default=report.RESULTS, help="folder of the results")
        options = parser.parse_args(arguments)
        path = options.output / f"{self.name}.json"
        named = "--case" in (sys.argv if arguments is None else arguments)
        runs: dict[str, dict[str, Any]] = json.loads(path.read_text())["runs"] if path.exists() else {}
        for seed in options.seeds:
            for case in options.case:
                if str(seed) in runs.get(case, {}) and not named:
                    continue
                with tempfile.TemporaryDirectory() as folder:
                    made = once(seed, [*self.cases[case], *options.set], Path(folder))
                runs.setdefault(case, {})[str(seed)] = made
                print(f"{case}, seed {seed}: accuracy {made['accuracy']}, {made['seconds']} s", flush=True)
                ordered = {name: dict(sorted(runs[name].items())) for name in self.cases if name in runs}
                path = report.write(self.name, self.question, {"runs": ordered}, options.output)
        found = json.loads(path.read_text())
        self.draw(found, options.output / f"{self.name}.png")
        if options.output == report.RESULTS:
            (DOCS / f"{self.name}.md").write_text(self.page(found))
        return path

    def page(self, found: Mapping[str, Any]) -> str:
        """Return the page for a result."""
        return self.head + "".join(f"{line}\n" for line in self._lines(found))

    def _lines(self, found: Mapping[str, Any]) -> Iterator[str]:
        commits = sorted({run["commit"] for runs in found["runs"].values() for run in runs.values()})
        yield f"{found['cores']} cores of {found['cpu']}, Python {found['python']}, commit {', '.join(commits)}.\n"
        yield "| case | seeds | after the warm-up | after training | staleness, mean | oldest |"
        yield "|---|---|---|---|---|---|"
        for case, runs in found["runs"].items():
            own = list(runs.values())
            accuracy = [
                _shown([run["accuracy"].get(moment, run["accuracy"].get("before")) for run in own], "%")
                for moment in ("after_warmup", "after")
            ]
            oldest = max(run["staleness_max"] for run in own)
            mean = _shown([run["staleness_mean"] for run in own])
            yield f"| {case} | {len(own)} | {accuracy[0]} | {accuracy[1]} | {mean} | {oldest:.0f} |"
        yield f"\n![Mean reward by step](../benchmarks/results/{self.name}.png)"

    def draw(self, found: Mapping[str, Any], path: Path) -> None:
        """Draw the mean reward by step, one line for each case: the mean over its seeds."""
        import matplotlib as mpl

        mpl.use("Agg")
        import matplotlib.pyplot as plt
        import numpy as np

        figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
        for number, (case, runs) in enumerate(found["runs"].items()):
            curves = np.array([run["reward"] for run in runs.values()])
            if not curves.size:
                continue  # a case without rewards, such as supervised training
            steps = np.arange(1, curves.shape[1] + 1)
            style = ("-", "--", ":")[number // 10 % 3]
            axes.plot(steps, curves.mean(axis=0), style, label=f"{case} ({len(curves)} seeds)", linewidth=1.2)
        axes.set(xlabel="step", ylabel="mean reward", title=self.title)
        axes.legend(fontsize=8)
        axes.grid(alpha=0.3)
        figure.savefig(path, dpi=120)
        plt.close(figure)


def once(seed: int, chosen: Sequence[str], folder: Path) -> dict[str, Any]:
    """Run the quickstart with a seed and some settings; what was learned, how old it was, and how fast it went."""
    started = time.monotonic()
    flow = Flow.from_yaml(EXAMPLE, f"seed={seed}", f"output.folder={folder / 'run'}", *chosen).start()
    summary, steps = flow.wait(), flow.metrics.of("step")
    return {
        "accuracy": {record["moment"]: record["accuracy"] for record in flow.metrics.of("eval")},
        "reward": [round(step["reward_mean"], 4) for step in steps if "reward_mean" in step],
        "staleness_mean": summary.values.get("staleness/mean", 0.0),
        "staleness_max": summary.values.get("staleness/max", 0.0),
        "ledger": summary["ledger"],
        "rows_per_s": summary.values.get("rows_per_s"),
        "seconds": round(time.monotonic() - started, 1),
        "commit": report.circumstances()["commit"],
        "overrides": list(chosen),
    }


def _shown(values: Sequence[float], unit: str = "") -> str:
    spread = {name: value * (100 if unit else 1) for name, value in report.spread(values).items()}
    return f"{spread['median']:.3g}{unit} ({spread['min']:.3g}–{spread['max']:.3g})"
