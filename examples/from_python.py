"""The same run from Python: a dataset from memory, metrics while it runs, the summary at its end."""

import sys
from pathlib import Path

from asyncflow import Flow

FOLDER = Path(__file__).parent
ITEMS = [{"question": f"{number}+1=", "plural": str(number + 1)} for number in range(60)]


def main(*overrides: str) -> None:
    flow = Flow.from_yaml(FOLDER / "plurals" / "pipeline.yaml", "data.source=python", *overrides, dataset=ITEMS)
    flow.metrics.listeners.append(lambda record: print(record["kind"], record.get("step"), record.get("reward_mean")))
    summary = flow.start().wait()
    print(f"accuracy {summary['eval/accuracy_before']:.0%} -> {summary['eval/accuracy_after']:.0%} in {flow.folder}")


if __name__ == "__main__":
    main(*sys.argv[1:])
