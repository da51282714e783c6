"""What emulated engines take their time by: a cost model of a few numbers, and lengths of responses.

Times are seconds on the clock of the emulation, `scale` is how many real seconds one of them takes. The lengths of
responses follow from the seed of each request, so that every mode has the same ones.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal, Self, get_args

import numpy as np

from asyncflow.errors import ConfigError
from asyncflow.types import Int64s

Kind = Literal["fixed", "uniform", "lognormal"]


@dataclass(frozen=True, slots=True)
class Lengths:
    """How many tokens responses have, the last one included; at least 1 and at most the budget of a request."""

    kind: Kind = "fixed"
    """`fixed`: the mean; `uniform`: from 1 to twice the mean; `lognormal`: with a long tail."""
    mean: float = 64.0
    sigma: float = 1.0
    """Of `lognormal`: the standard deviation of the logarithm."""

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind) or not self.mean >= 1 or not self.sigma > 0:
            kinds = ", ".join(get_args(Kind))
            raise ConfigError(f"lengths: a kind of {kinds}, a mean of at least 1, a sigma above 0; found {self}")

    def draw(self, seeds: Int64s) -> Int64s:
        """Return a length for each seed."""
        found = np.array([self._one(int(seed) & (2**63 - 1)) for seed in seeds], np.float64)
        return np.maximum(1, np.rint(found)).astype(np.int64)

    def _one(self, seed: int) -> float:
        if self.kind == "fixed":
            return self.mean
        random = np.random.default_rng(seed)
        if self.kind == "uniform":
            return float(random.uniform(1, 2 * self.mean - 1))
        return float(random.lognormal(np.log(self.mean) - self.sigma**2 / 2, self.sigma))


@dataclass(frozen=True, slots=True)
class InferCosts:
    """What an inference engine needs, in seconds."""

    prefill: float = 0.0
    """For each token of a prompt."""
    decode: float = 0.01
    """For one token of every running request, however many these are."""
    request: float = 0.0
    """On top of that, for each of them."""
    apply: float = 0.0
    """To switch to new weights."""
    scale: float = 1.0
    lengths: Lengths = field(default_factory=Lengths)

    @classmethod
    def of(cls, options: Mapping[str, object]) -> Self:
        """Read the options of an engine; ConfigError for what is not there or not a cost."""
        chosen = dict(options)
        lengths: Any = chosen.pop("lengths", {})
        known = {each.name for each in fields(Lengths)}
        if not isinstance(lengths, Mapping) or lengths.keys() - known:
            raise ConfigError(f"emulated: lengths has {', '.join(sorted(known))}; found {lengths!r}")
        numbers = {name: value for name, value in lengths.items() if name != "kind"}
        if any(isinstance(value, bool) or not isinstance(value, int | float) for value in numbers.values()):
            raise ConfigError(f"emulated: {', '.join(numbers)} of lengths are numbers; found {numbers}")
        return cls(**_costs(cls, chosen), lengths=Lengths(**lengths))


@dataclass(frozen=True, slots=True)
class TrainCosts:
    """What a training engine needs, in seconds."""

    token: float = 1e-4
    """For each token that goes forward and back, padding not counted."""
    step: float = 0.0
    """For an optimizer step."""
    weights: float = 1e6
    """Bytes of the weights; they are real."""
    scale: float = 1.0

    @classmethod
    def of(cls, options: Mapping[str, object]) -> Self:
        """Read the options of an engine; ConfigError for what is not there or not a cost."""
        return cls(**_costs(cls, options))


def _costs(kind: type, options: Mapping[str, object]) -> dict[str, float]:
    known = [each.name for each in fields(kind) if each.name != "lengths"]
    for name, value in options.items():
        if name not in known:
            raise ConfigError(f"emulated: option {name!r} does not exist; there are {', '.join(known)}")
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
            raise ConfigError(f"emulated: option {name} is a number of at least 0, found {value!r}")
    return {name: float(value) for name, value in options.items() if isinstance(value, int | float)}
