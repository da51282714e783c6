"""Which options each algorithm reads, and with which defaults; free of torch, so that a file can be checked without it.

An option that was given but would have no effect is a mistake of the user's: `unused` says which and why.
"""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Algorithm:
    """A named choice of advantage, and what it reads of the section `train`."""

    name: str
    advantage: str
    """Name of the function in `asyncflow.algorithms.advantages`."""
    defaults: Mapping[str, object]
    """Value of each option that it uses, where the user gives none."""

    @property
    def uses(self) -> frozenset[str]:
        """Names of the options that it reads."""
        return frozenset(self.defaults)


_POLICY: Mapping[str, object] = {
    "clip_low": 0.2,
    "clip_high": 0.2,
    "kl_coef": 0.0,
    "kl": "k3",
    "entropy_coef": 0.0,
    "aggregate": "token-mean",
    "aggregate_length": None,
}

ALGORITHMS: Mapping[str, Algorithm] = {
    "grpo": Algorithm("grpo", "grpo", {**_POLICY, "std": "unbiased"}),
    "dr_grpo": Algorithm("dr_grpo", "dr_grpo", {**_POLICY, "aggregate": "seq-mean-token-sum-norm"}),
    "rloo": Algorithm("rloo", "rloo", _POLICY),
}

OPTIONS: frozenset[str] = frozenset[str]().union(*(algorithm.uses for algorithm in ALGORITHMS.values()))
"""Every option that some algorithm reads."""


def resolve(algorithm: str, given: Mapping[str, object]) -> dict[str, object]:
    """Return the value of every option that the algorithm uses: what was given, else its default."""
    defaults = ALGORITHMS[algorithm].defaults
    return {name: given.get(name, default) for name, default in defaults.items()}


def unused(algorithm: str, given: Mapping[str, object]) -> list[str]:
    """Return a line for each given option without effect; names that no algorithm reads are passed over."""
    options = resolve(algorithm, given)
    lines = []
    for name in given:
        if name in OPTIONS and name not in options:
            users = ", ".join(sorted(other.name for other in ALGORITHMS.values() if name in other.uses))
            lines.append(f"{name} is not used by {algorithm}, only by {users}")
        elif name == "kl" and options["kl_coef"] == 0:
            lines.append("kl has no effect while kl_coef is 0")
        elif name == "aggregate_length" and options["aggregate"] != "seq-mean-token-sum-norm":
            lines.append(
                f"aggregate_length is not used by aggregate {options['aggregate']}, only by seq-mean-token-sum-norm"
            )
    return lines


def reads(options: Mapping[str, object]) -> tuple[str, ...]:
    """Return the columns that the policy loss reads beside tokens and mask."""
    reference = ("ref_logprobs",) if options["kl_coef"] != 0 else ()
    return ("advantage", "rollout_logprobs", *reference)
