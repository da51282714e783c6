"""Recipes, and which options have an effect; free of torch, so that a file can be checked without it.

A recipe is a named set of values for options that all recipes share: advantage and loss are two of them. An option
that was given but has no effect, because of what others are, is a mistake of the user's: `unused` says which and why.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

Value = object

BASE: Mapping[str, Value] = {
    "advantage": "grpo",
    "std": "unbiased",
    "gamma": 1.0,
    "gae_lambda": 1.0,
    "whiten": False,
    "distill_coef": 0.0,
    "loss": "ppo",
    "clip_low": 0.2,
    "clip_high": 0.2,
    "dual_clip": None,
    "kl_coef": 0.0,
    "kl": "k3",
    "kl_in": "loss",
    "kl_unbiased": False,
    "entropy_coef": 0.0,
    "aggregate": "token-mean",
    "aggregate_length": None,
    "filters": {},
    "dynamic_sampling": 0,
    "overlong": 0.0,
    "off_policy": "none",
    "off_policy_level": "token",
    "off_policy_low": 0.0,
    "off_policy_high": 2.0,
    "off_policy_metric": "ratio",
    "off_policy_reduce": "token",
}
"""Every option of an algorithm, and its value where neither the recipe nor the user gives one."""

RECIPES: Mapping[str, Mapping[str, Value]] = {
    "grpo": {},
    "dr_grpo": {"advantage": "dr_grpo", "aggregate": "seq-mean-token-sum-norm"},
    "dapo": {"clip_high": 0.28, "dynamic_sampling": 10, "overlong": 0.2},
    "gspo": {"loss": "gspo", "clip_low": 3e-4, "clip_high": 4e-4, "aggregate": "seq-mean-token-mean"},
    "cispo": {"loss": "cispo", "clip_low": 1.0, "clip_high": 4.0},
    "rloo": {"advantage": "rloo"},
    "maxrl": {"advantage": "maxrl"},
    "reinforce++": {"advantage": "reinforce++", "whiten": True, "kl_in": "reward", "kl": "k1"},
    "reinforce++-baseline": {"advantage": "reinforce++-baseline", "whiten": True, "kl_in": "reward", "kl": "k2"},
    "ppo": {"advantage": "gae", "whiten": True, "gae_lambda": 0.95, "kl_in": "reward", "kl": "k1"},
    "opd": {"advantage": "none", "loss": "pg", "distill_coef": 1.0},
    "sft": {},
}
"""What each recipe has of its own. Papers: docs/algorithms.md."""

SUPERVISED = frozenset({"sft"})
"""Recipes that train on given answers: none of the options above has an effect, and none of these."""
_OF_RESPONSES = ("group_size", "reward")

ADVANTAGES = ("grpo", "dr_grpo", "rloo", "maxrl", "reinforce++", "reinforce++-baseline", "gae", "none")
LOSSES = ("ppo", "gspo", "gspo-token", "cispo", "pg")
BY_GROUP = frozenset({"grpo", "dr_grpo", "rloo", "maxrl", "reinforce++-baseline"})
"""Advantages that compare the responses of a group."""
BY_TOKEN = frozenset({"reinforce++", "reinforce++-baseline", "gae"})
"""Advantages that differ from token to token; so does every other that is whitened or distilled."""
CORRECTIONS = ("decoupled", "tis", "icepop", "reject", "a3po")
"""Ways to make up for what another version or another engine made."""


@dataclass(frozen=True, slots=True)
class _Needs:
    """An option has an effect only where another has one of some values."""

    other: str
    values: tuple[Value, ...] = ()
    not_zero: bool = False
    own: str = ""
    """An option: where it names a function of the user's, that may have a use for this one."""

    def met(self, options: Mapping[str, Value]) -> bool:
        value = options[self.other]
        return bool(value) if self.not_zero else value in self.values or (bool(self.own) and is_path(options[self.own]))

    def why(self, options: Mapping[str, Value]) -> str:
        if self.not_zero:
            return f"has no effect while {self.other} is 0"
        return f"is not used by {self.other} {options[self.other]}, only by {', '.join(map(str, self.values))}"


_OLD = _Needs("off_policy", ("none", "a3po"), own="loss")
"""With the other corrections the ratio is 1: there is nothing to clip."""
_CLIP = (_Needs("loss", LOSSES[:-1], own="loss"), _OLD)
_REWARDED = _Needs("advantage", ADVANTAGES[:-1], own="advantage")
_KL = _Needs("kl_coef", not_zero=True)
_NEEDS: Mapping[str, tuple[_Needs, ...]] = {
    "std": (_Needs("advantage", ("grpo",)),),
    "gamma": (_Needs("advantage", ("reinforce++", "gae")),),
    "gae_lambda": (_Needs("advantage", ("gae",)),),
    "clip_low": _CLIP,
    "clip_high": _CLIP,
    "dual_clip": (_Needs("loss", ("ppo",)), _OLD),
    "kl": (_KL,),
    "kl_in": (_KL,),
    "kl_unbiased": (_KL, _Needs("kl_in", ("loss",))),
    "dynamic_sampling": (_Needs("advantage", tuple(sorted(BY_GROUP)), own="advantage"),),
    "overlong": (_REWARDED,),
    "aggregate_length": (_Needs("aggregate", ("seq-mean-token-sum-norm",)),),
    "off_policy_level": (_Needs("off_policy", ("tis",)),),
    "off_policy_low": (_Needs("off_policy", ("tis", "icepop", "reject")),),
    "off_policy_high": (_Needs("off_policy", CORRECTIONS),),
    "off_policy_metric": (_Needs("off_policy", ("reject",)),),
    "off_policy_reduce": (_Needs("off_policy", ("reject",)),),
}


def resolve(algorithm: str, given: Mapping[str, Value]) -> dict[str, Value]:
    """Return the value of every option: what was given, else the recipe's, else the common one.

    What a recipe has of its own gives way where, beside what was given, it would have no effect.
    """
    chosen = {name: value for name, value in given.items() if name in BASE}
    options = {**BASE, **RECIPES[algorithm], **chosen}
    idle = [name for name in RECIPES[algorithm].keys() - chosen.keys() if not _has_effect(name, options)]
    return {**options, **{name: BASE[name] for name in idle}}


def _has_effect(name: str, options: Mapping[str, Value]) -> bool:
    return all(need.met(options) for need in _NEEDS.get(name, ()))


def unused(algorithm: str, given: Mapping[str, Value]) -> list[str]:
    """Return a line for each given option without effect; names that are no options are passed over."""
    if algorithm in SUPERVISED:
        why = f"has no effect with algorithm {algorithm}, which trains on given answers"
        return [f"{name} {why}" for name in given if name in BASE or name in _OF_RESPONSES]
    options = resolve(algorithm, given)
    found = ((name, need) for name in given for need in _NEEDS.get(name, ()) if not need.met(options))
    reasons: dict[str, str] = {}
    for name, need in found:
        reasons.setdefault(name, f"{name} {need.why(options)}")
    return list(reasons.values())


def is_path(value: Value) -> bool:
    """Whether a value names a function of the user's: `module:function` or `file.py:function`."""
    return isinstance(value, str) and ":" in value


def by_token(options: Mapping[str, Value]) -> bool:
    """Whether each token has an advantage of its own."""
    return options["advantage"] in BY_TOKEN or bool(options["whiten"]) or bool(options["distill_coef"])


def kl_in_reward(options: Mapping[str, Value]) -> bool:
    """Whether the distance from the reference is taken off the reward."""
    return bool(options["kl_coef"]) and options["kl_in"] == "reward"


def scores(options: Mapping[str, Value]) -> tuple[str, ...]:
    """Return the columns that the advantage is made of, beside the reward."""
    needs = {
        "response_mask": by_token(options) or kl_in_reward(options) or bool(options["overlong"]),
        "rollout_logprobs": kl_in_reward(options) or bool(options["distill_coef"]),
        "ref_logprobs": kl_in_reward(options),
        "values": options["advantage"] == "gae",
        "teacher_logprobs": bool(options["distill_coef"]),
    }
    return tuple(name for name, needed in needs.items() if needed)


def reads(options: Mapping[str, Value]) -> tuple[str, ...]:
    """Return the columns that the policy loss reads beside tokens and mask.

    The trainer makes `ages` of `versions`, and `truncated` of `finish`.
    """
    needs = {
        "ref_logprobs": bool(options["kl_coef"]) and options["kl_in"] == "loss",
        "ages": options["off_policy"] == "a3po",
        "truncated": "finished" in filter_names(options),
    }
    return ("advantage", "rollout_logprobs", *(name for name, needed in needs.items() if needed))


def filter_names(options: Mapping[str, Value]) -> frozenset[str]:
    """Return the names of all filters, of whichever part of the loss."""
    filters = cast("Mapping[str, Sequence[str]]", options["filters"])
    return frozenset(name for names in filters.values() for name in names)


def whole(options: Mapping[str, Value]) -> bool:
    """Whether the gradient of a step can begin only when all of its rows are there."""
    return bool(options["whiten"]) or bool(filter_names(options))
