"""Engines by name; each is imported on first use, so that a missing package costs nobody who does not use it."""

from importlib import import_module
from importlib.metadata import entry_points
from typing import cast

from asyncflow.backends.base import InferFactory, TrainFactory
from asyncflow.errors import ConfigError

_BUILT_IN = {
    "infer": {
        "transformers": "asyncflow.backends.infer.transformers:TransformersEngine",
        "emulated": "asyncflow.backends.infer.emulated:EmulatedEngine",
    },
    "train": {
        "torch": "asyncflow.backends.train.torch:TorchEngine",
        "emulated": "asyncflow.backends.train.emulated:EmulatedTrainer",
    },
}


def names(kind: str) -> list[str]:
    """Names of the engines of a kind (`infer` or `train`), built in and registered by entry point."""
    return sorted({*_BUILT_IN[kind], *(point.name for point in entry_points(group=f"asyncflow.{kind}"))})


def _load(kind: str, name: str) -> object:
    if name in _BUILT_IN[kind]:
        module, _, attribute = _BUILT_IN[kind][name].partition(":")
        return getattr(import_module(module), attribute)
    for point in entry_points(group=f"asyncflow.{kind}", name=name):
        return point.load()
    raise ConfigError(f"{kind} backend {name!r} does not exist; there are {', '.join(names(kind))}")


def infer_engine(name: str) -> InferFactory:
    """Return the factory of an inference engine; ConfigError names those there are."""
    return cast("InferFactory", _load("infer", name))


def train_engine(name: str) -> TrainFactory:
    """Return the factory of a training engine; ConfigError names those there are."""
    return cast("TrainFactory", _load("train", name))
