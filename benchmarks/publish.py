"""How long does publishing hold up the trainer? The copy of the weights, beside the whole way to where engines load.

python -m benchmarks.publish [--rounds N] [--width W] [--output FOLDER]

A model is made from a config and published again and again, in the background and in the trainer's own thread; after
each version the trainer waits until it is there, so that nothing is under way when the next one begins.
"""

import argparse
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from asyncflow.backends.base import ModelSpec, OptimSpec
from asyncflow.backends.train.torch import TorchEngine
from asyncflow.weights import FileChannel
from asyncflow.weights.publisher import Publisher
from benchmarks import report

QUESTION = "How long does publishing hold up the trainer?"


def engine(width: int) -> TorchEngine:
    """Return a trainer of a new model with 4 layers of a width."""
    config = {
        "model_type": "qwen2", "vocab_size": 32_000, "hidden_size": width, "intermediate_size": 4 * width,
        "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 8, "tie_word_embeddings": True,
    }  # fmt: skip
    spec = ModelSpec(path=None, config=config, dtype="float32", seed=0, pad_token=0, eos_token=1)
    return TorchEngine(spec, optim=OptimSpec(), temperature=1.0, options={})


def measure(trainer: TorchEngine, folder: Path, rounds: int) -> dict[str, list[float]]:
    """Seconds that the trainer was held up, and that a version took, for each round in turn."""
    found: dict[str, list[float]] = {"held": [], "published": [], "in its own thread": []}
    there = threading.Event()
    failures: list[str] = []
    publisher = Publisher(FileChannel(folder / "background"), lambda version: there.set(), failures.append, 600.0)
    own = FileChannel(folder / "own")
    for version in range(rounds + 1):
        there.clear()
        started = time.perf_counter()
        publisher.publish(version, trainer.export_weights())
        held = time.perf_counter() - started
        if not there.wait(600.0):
            raise TimeoutError(f"version {version} was not published: {failures}")
        published = time.perf_counter() - started
        started = time.perf_counter()
        own.publish(version, trainer.export_weights())
        alone = time.perf_counter() - started
        if version:  # the first one makes folders and warms memory up
            for name, seconds in zip(found, (held, published, alone), strict=True):
                found[name].append(seconds)
        for channel in (own, FileChannel(folder / "background")):
            channel.retire(version)
    publisher.close()
    return found


def main(arguments: Sequence[str] | None = None) -> Path:
    """Measure, print and write results/publish.json."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.publish", description=QUESTION)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--output", type=Path, default=report.RESULTS, help="folder of the results")
    options = parser.parse_args(arguments)
    trainer = engine(options.width)
    size = sum(tensor.nbytes for _, tensor in trainer.export_weights())
    with tempfile.TemporaryDirectory() as folder:
        found = measure(trainer, Path(folder), options.rounds)
    ratios = [held / alone for held, alone in zip(found["held"], found["in its own thread"], strict=True)]
    shown = {name: report.spread(seconds) for name, seconds in found.items()}
    result = {"bytes": size, "seconds": shown, "held / in its own thread": report.spread(ratios)}
    print(f"{size / 1e6:.0f} MB: " + ", ".join(f"{name} {1e3 * s['median']:.0f} ms" for name, s in shown.items()))
    return report.write("publish", QUESTION, result, options.output)


if __name__ == "__main__":
    main()
