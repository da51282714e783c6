"""How long do new weights take to an engine over each channel, and how long do they hold up the trainer?

python -m benchmarks.publish [--rounds N] [--width W] [--output FOLDER]

The weights of a model are published again and again, over one channel after another in each round, to one engine: a
process that copies what it gets into memory of its own. Nothing is under way when the next one begins. A training
step changes every weight; with `frozen` it changes those of one layer of four alone.
"""

import argparse
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from asyncflow.config.model import Data, Model, Pipeline, Reward, Weights
from asyncflow.execute.spawn import pipe, spawn
from asyncflow.weights import sender
from asyncflow.weights.publisher import Publisher
from benchmarks import receiver, report

QUESTION = "How long do new weights take to an engine over each channel, and how long do they hold up the trainer?"
SEED = 0
PATIENCE = 600.0
SUBJECTS = {
    "file": {"channel": "file"},
    "shm": {"channel": "shm"},
    "tcp": {"channel": "tcp"},
    "collective": {"channel": "collective"},
    "file, delta": {"channel": "file", "delta": True},
    "shm, delta": {"channel": "shm", "delta": True},
    "tcp, delta": {"channel": "tcp", "delta": True},
}
CHANGES = ("every weight", "frozen")
LAYERS = 4


class Trainer:
    """The weights of a model with four layers of a width, in the shapes of today's decoders."""

    def __init__(self, width: int) -> None:
        torch.manual_seed(SEED)
        torch.set_num_threads(1)
        self.weights = {"embed": torch.randn(64 * width, width)}
        for layer in range(LAYERS):
            for name, rows in {"q": 1, "k": 1, "v": 1, "o": 1, "gate": 4, "up": 4, "down": 4}.items():
                self.weights[f"layers.{layer}.{name}"] = torch.randn(rows * width, width)
            self.weights[f"layers.{layer}.norm"] = torch.ones(width)

    def step(self, change: str) -> None:
        """Change some of them."""
        for name, tensor in self.weights.items():
            if change == "every weight" or name.startswith("layers.0."):
                tensor.add_(1e-3)

    def export_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield a copy of each, as a training engine does."""
        for name, tensor in self.weights.items():
            yield name, tensor.clone()


@dataclass(slots=True)
class Subject:
    """The trainer's end of one channel, and the engine at the other."""

    name: str
    engine: Connection
    publisher: Publisher = field(init=False)
    version: int = 0
    _offers: list[bytes] = field(default_factory=list)
    _there: threading.Event = field(default_factory=threading.Event)
    _failures: list[str] = field(default_factory=list)

    def told(self, version: int, offer: bytes) -> None:
        """Hear that a version is there."""
        self._offers.append(offer)
        self._there.set()

    def failed(self, why: str) -> None:
        """Hear that a version is not."""
        self._failures.append(why)
        self._there.set()

    def send(self, trainer: Trainer) -> dict[str, float]:
        """Publish a version and have the engine stage it; return the seconds that each part took."""
        self.version += 1
        self._there.clear()
        started = time.perf_counter()
        self.publisher.publish(self.version, trainer.export_weights())
        held = time.perf_counter() - started
        if not self._there.wait(PATIENCE) or not self._offers:
            raise RuntimeError(f"{self.name}: version {self.version} was not published: {self._failures}")
        published = time.perf_counter() - started
        self.engine.send((self.name, self.version, self._offers.pop()))
        staged = self.engine.recv()
        if not isinstance(staged, float):
            raise RuntimeError(f"{self.name}: version {self.version} was not staged: {staged}")
        self.publisher.retire(self.version)
        return {"held": held, "published": published, "staged": staged}


def pipeline(weights: Mapping[str, object]) -> Pipeline:
    """Return a pipeline with this channel."""
    chosen = Weights.model_validate({**weights, "timeout": PATIENCE})
    return Pipeline(model=Model(path="."), data=Data(source="python"), reward=Reward(fn="exact_match"), weights=chosen)


@contextmanager
def subjects(folder: Path) -> Iterator[list[Subject]]:
    """Start an engine and make both ends of every channel."""
    configs = {name: pipeline(weights) for name, weights in SUBJECTS.items()}
    ours, theirs = pipe()
    process = spawn(receiver.serve, (configs, theirs), "engine")
    theirs.close()
    found = [Subject(name, ours) for name in configs]
    with ExitStack() as stack:
        stack.callback(process.join, PATIENCE)
        stack.callback(ours.close)
        for own in found:
            channel = sender(configs[own.name], folder / own.name.replace(", ", "-"))
            own.publisher = Publisher(channel, own.told, own.failed, PATIENCE)
            stack.callback(own.publisher.close)
        ours.recv()
        yield found


def measure(trainer: Trainer, each: Sequence[Subject], rounds: int) -> dict[str, dict[str, list[float]]]:
    """Return the seconds of each part for each change and channel, and those of a copy of the same bytes."""
    found: dict[str, dict[str, list[float]]] = {}
    memory = dict(trainer.export_weights())
    for number in range(rounds + 2):
        for change in CHANGES:
            for own in each:
                trainer.step(change)
                parts = own.send(trainer)
                if number > 1:  # the first two make folders, connections and slots, and warm memory up
                    for part, seconds in parts.items():
                        found.setdefault(f"{change}: {own.name}", {}).setdefault(part, []).append(seconds)
        started = time.perf_counter()
        for name, tensor in trainer.weights.items():
            memory[name].copy_(tensor)
        found.setdefault("memcpy", {}).setdefault("copied", []).append(time.perf_counter() - started)
    return found


def table(found: Mapping[str, Any]) -> str:
    """Return the part of docs/weights.md that shows a result."""
    copied = 1e3 * found["seconds"]["memcpy"]["copied"]["median"]
    lines = [
        f"{found['bytes'] / 1e6:.0f} MB of float32 on {found['cores']} cores of {found['cpu']}, load "
        f"{found['load']:.1f}, commit {found['commit']}, {found['rounds']} rounds: medians in milliseconds, where a "
        f"copy of the same bytes takes {copied:.0f}. The trainer waits for the copy alone.",
        "",
        "| what changes: channel | the trainer waits | until it is published | the engine has staged it |",
        "|---|---|---|---|",
    ]
    for name, parts in found["seconds"].items():
        if name != "memcpy":
            shown = " | ".join(f"{1e3 * parts[part]['median']:.0f}" for part in ("held", "published", "staged"))
            lines.append(f"| {name} | {shown} |")
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> Path:
    """Measure, print and write results/publish.json."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.publish", description=QUESTION)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--output", type=Path, default=report.RESULTS, help="folder of the results")
    options = parser.parse_args(arguments)
    trainer = Trainer(options.width)
    size = sum(tensor.nbytes for tensor in trainer.weights.values())
    with tempfile.TemporaryDirectory() as folder, subjects(Path(folder)) as each:
        found = measure(trainer, each, options.rounds)
    shown = {name: {part: report.spread(seconds) for part, seconds in parts.items()} for name, parts in found.items()}
    print(f"{size / 1e6:.0f} MB, milliseconds:")
    for name, parts in shown.items():
        print(f"{name:28}" + "".join(f"  {part} {1e3 * seconds['median']:.1f}" for part, seconds in parts.items()))
    result = {"bytes": size, "seed": SEED, "rounds": options.rounds, "seconds": shown}
    return report.write("publish", QUESTION, result, options.output)


if __name__ == "__main__":
    main()
