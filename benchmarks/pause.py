"""How long does generation stand still when new weights come? Beside the time of one step of decoding.

python -m benchmarks.pause [--updates N] [--width W] [--rows B] [--output FOLDER]

Rows of a new model are generated on, and their weights change again and again, keys and values kept or recomputed.
The gap between the token before an update and the one after it, less a step of decoding, is the pause: a step is the
median gap between two tokens around the same update, so that both see the same rows, length and machine. The new
weights are staged by another thread while tokens are drawn; the gaps meanwhile tell what that costs.
"""

import argparse
import statistics
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from torch import Tensor

from asyncflow.backends.base import ModelSpec, Request, Sampling
from asyncflow.backends.infer.transformers import TransformersEngine
from asyncflow.backends.models import new_model
from asyncflow.types import Version
from benchmarks import report

QUESTION = "How long does generation stand still when new weights come?"
PROMPT, AROUND = 32, 8
"""Tokens of a prompt, and steps before and after an update that tell how long a step takes."""


class Clocked(TransformersEngine):
    """Notes when each token of the rows was there."""

    def __init__(self, model: ModelSpec, rows: int) -> None:
        super().__init__(model, max_inflight=rows, options={})
        self.ticks: list[float] = []
        self.ticked = threading.Condition()
        self.switched = 0
        """How many tokens there were when the weights changed."""

    def _token(self) -> None:
        super()._token()
        with self.ticked:
            self.ticks.append(time.perf_counter())
            self.ticked.notify_all()

    def _switch(self, version: Version, staged: Mapping[str, Tensor]) -> None:
        super()._switch(version, staged)
        self.switched = len(self.ticks)

    def after(self, tokens: int) -> int:
        """Wait for so many tokens more; return how many there are."""
        with self.ticked:
            wanted = len(self.ticks) + tokens
            if not self.ticked.wait_for(lambda: len(self.ticks) >= wanted, 600.0):
                raise TimeoutError(f"{len(self.ticks)} of {wanted} tokens were drawn in 600 s")
            return len(self.ticks)


def model(width: int, length: int) -> ModelSpec:
    """Describe a new model with 4 layers of a width."""
    config = {
        "model_type": "qwen2", "vocab_size": 8_000, "hidden_size": width, "intermediate_size": 4 * width,
        "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 8, "tie_word_embeddings": True,
        "max_position_embeddings": length,
    }  # fmt: skip
    return ModelSpec(path=None, config=config, dtype="float32", seed=0, pad_token=0, eos_token=1)


def measure(spec: ModelSpec, rows: int, updates: int) -> dict[str, dict[str, list[float]]]:
    """Return, for keys that are kept and recomputed in turn, each update's pause and what else was measured."""
    engine = Clocked(spec, rows)
    tensors = list(new_model(spec).state_dict().items())
    engine.stage_weights(0, tensors)
    engine.apply_weights(0)
    rng = np.random.default_rng(0)
    budget = Sampling(max_tokens=100_000)  # the model's length ends them
    engine.submit([Request(row, rng.integers(2, 8_000, PROMPT), budget, row) for row in range(rows)])
    results = threading.Thread(target=lambda: list(engine.results(range(rows))), name="results", daemon=True)
    results.start()
    names = ("keep", "recompute")
    found: dict[str, dict[str, list[float]]] = {name: {} for name in names}
    engine.after(AROUND)
    for update in range(2 * updates):
        one = updated(engine, update + 1, tensors, recompute=bool(update % 2))
        if update >= len(names):  # the first of each warms up
            for name, value in one.items():
                found[names[update % 2]].setdefault(name, []).append(value)
    engine.abort(range(rows))
    results.join(60.0)
    engine.close()
    return found


def updated(
    engine: Clocked, version: int, tensors: Sequence[tuple[str, Tensor]], *, recompute: bool
) -> Mapping[str, float]:
    """Stage and apply a version while tokens are drawn."""
    before = engine.after(AROUND)
    engine.stage_weights(version, tensors)
    staged = engine.after(1)
    engine.after(AROUND)
    engine.apply_weights(version, recompute=recompute)
    last = engine.after(AROUND + 2)
    gaps, there = np.diff(engine.ticks[:last]), engine.switched
    step = statistics.median([*gaps[staged : there - 1], *gaps[there:]])
    pause = max(0.0, float(gaps[there - 1]) - step)
    return {
        "tokens before": PROMPT + there,
        "step": step,
        "pause": pause,
        "pause / step": pause / step,
        "step while staging / step": statistics.median(gaps[before - 1 : staged]) / step,
    }


def main(arguments: Sequence[str] | None = None) -> Path:
    """Measure, print and write results/pause.json."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.pause", description=QUESTION)
    parser.add_argument("--updates", type=int, default=9, help="of each kind, the first not counted")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--output", type=Path, default=report.RESULTS, help="folder of the results")
    options = parser.parse_args(arguments)
    spec = model(options.width, PROMPT + 2 * options.updates * (4 * AROUND + 64) + 1024)
    found = measure(spec, options.rows, options.updates)
    kinds = {kind: {name: report.spread(values) for name, values in one.items()} for kind, one in found.items()}
    for kind, one in kinds.items():
        print(f"{kind}: the pause is {one['pause / step']['median']:.2f} steps of decoding")
    size = sum(tensor.nbytes for tensor in new_model(spec).state_dict().values())
    result = {"bytes": size, "rows": options.rows, "prompt": PROMPT, "interrupt": kinds}
    return report.write("pause", QUESTION, result, options.output)


if __name__ == "__main__":
    main()
