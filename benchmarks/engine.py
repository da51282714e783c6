"""How near does the engine come to the ideal pipeline, in which the slowest stage never waits?

python -m benchmarks.engine [--steps N] [--seconds S] [--case CASE …] [--mode MODE …]

Emulated engines take a step's rows in so many seconds each; rows and weights are real and go through queue,
controllers and channels. The ideal is the slowest of the two engines alone. What is measured begins when the first
step is trained, since before that the pipeline fills.
"""

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from asyncflow import Flow
from asyncflow.config.load import load
from benchmarks import report

QUESTION = "How near does the engine come to the ideal pipeline, in which the slowest stage never waits?"
PROMPTS, GROUP, PROMPT, RESPONSE = 8, 4, 16, 64
CASES = {"trainer is slowest": (0.5, 1.0), "both alike": (1.0, 1.0), "rollout is slowest": (1.0, 0.5)}
"""Of each case, the share of the step's seconds that rollout and training take."""

MODES = ("separated", "streaming", "async")


def settings(folder: Path, mode: str, rollout: float, train: float, steps: int, **lengths: object) -> dict[str, Any]:
    """A pipeline whose rollout and whose training of a step take so many seconds each."""
    rows = PROMPTS * GROUP
    return {
        "model": {"config": {"model_type": "qwen2"}, "tokenizer": "characters"},
        "data": {"source": "python", "max_prompt_tokens": PROMPT, "prompt": "{prompt}", "answer": "a"},
        "reward": {"fn": "char_match"},
        "rollout": {
            "backend": "emulated", "max_inflight": rows, "max_response_tokens": 8 * RESPONSE,
            "options": {"decode": rollout / RESPONSE, "lengths": {"mean": RESPONSE, **lengths}},
        },
        "train": {
            "backend": "emulated", "group_size": GROUP, "prompts_per_step": PROMPTS, "steps": steps,
            "token_budget": 10 * RESPONSE, "options": {"token": train / rows / (PROMPT + RESPONSE)},
        },
        "mode": mode,
        "output": {"folder": str(folder / mode), "samples_every": 0},
    }  # fmt: skip


def dataset() -> list[dict[str, str]]:
    """Prompts of equal length."""
    return [{"prompt": f"{number:0{PROMPT}d}"} for number in range(1024)]


def seconds(folder: Path, chosen: dict[str, Any]) -> float:
    """Run a pipeline; return the seconds from the first step's end to the last one's, for each step."""
    flow = Flow(load([], base=chosen).pipeline, dataset=dataset())
    flow.start().wait()
    ends = [record["time"]["elapsed"] for record in flow.metrics.of("step")]
    return (ends[-1] - ends[0]) / (len(ends) - 1)


def main(arguments: Sequence[str] | None = None) -> Path:
    """Measure, print and write results/engine.json."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.engine", description=QUESTION)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--seconds", type=float, default=4.0, help="of a step in the slowest stage")
    parser.add_argument("--output", type=Path, default=report.RESULTS, help="folder of the results")
    parser.add_argument("--case", choices=CASES, nargs="+", default=list(CASES))
    parser.add_argument("--mode", choices=MODES, nargs="+", default=list(MODES))
    options = parser.parse_args(arguments)
    found: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for case in options.case:
            rollout, train = (share * options.seconds for share in CASES[case])
            ideal = max(rollout, train)
            for mode in options.mode:
                place = Path(folder) / case.replace(" ", "-")
                each = seconds(place, settings(place, mode, rollout, train, options.steps))
                found.setdefault(case, {})[mode] = ideal / each
                print(f"{case}, {mode}: {ideal / each:.3f} of the ideal pipeline")
    result = {"seconds": options.seconds, "steps": options.steps, "share of the ideal": found}
    return report.write("engine", QUESTION, result, options.output)


if __name__ == "__main__":
    main()
