"""Which reward function a worker runs: plain values that cross to its process, where the function is made from them."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from asyncflow.config.importing import resolve
from asyncflow.config.sources import scheme
from asyncflow.errors import ConfigError
from asyncflow.rewards.scorers import BUILT_IN, reasoning_gym
from asyncflow.rewards.signature import Scorer, adapt

if TYPE_CHECKING:
    from asyncflow.config.model import Pipeline


@dataclass(frozen=True, slots=True)
class RewardSpec:
    """A reward function by name, with what it needs to be made."""

    fn: str
    """A built-in name, `module:function` or `file.py:function`."""
    options: Mapping[str, Any] = field(default_factory=dict)
    source: str = ""
    """`data.source`, for the reward `reasoning_gym`."""
    source_options: Mapping[str, Any] = field(default_factory=dict)
    size: int = 0
    seed: int = 0
    fields: Collection[str] | None = None
    """Fields of the items, so that a parameter that none of them provides is refused at the start."""

    @classmethod
    def of(cls, pipeline: "Pipeline", fields: Collection[str] | None = None) -> "RewardSpec":
        """Take the parts of a pipeline that a reward depends on."""
        reward, data = pipeline.reward, pipeline.data
        return cls(reward.fn, reward.options, data.source, data.options, data.size or 0, pipeline.seed, fields)

    def scorer(self) -> Scorer:
        """Make the function; ConfigError if it cannot be found or does not fit."""
        if self.fn != "reasoning_gym":
            function = BUILT_IN[self.fn] if self.fn in BUILT_IN else resolve(self.fn)
            return adapt(function, self.options, self.fields)
        kind, task = scheme(self.source)
        if kind != "reasoning_gym":
            raise ConfigError(f"reward.fn: reasoning_gym scores only its own tasks: data.source is {self.source!r}")
        return adapt(reasoning_gym(task, self.source_options, self.size, self.seed), self.options, self.fields)
