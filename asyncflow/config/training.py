"""The sections of a pipeline file that say how the policy is trained."""

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from asyncflow.algorithms.options import BASE, SUPERVISED, resolve
from asyncflow.config.fields import (
    Aggregate,
    Count,
    Flag,
    Float,
    NonNegative,
    Positive,
    PositiveInt,
    Section,
    Share,
    Unit,
)

Algorithm = Literal[
    "grpo",
    "dr_grpo",
    "dapo",
    "gspo",
    "cispo",
    "rloo",
    "maxrl",
    "reinforce++",
    "reinforce++-baseline",
    "ppo",
    "opd",
    "sft",
]
Component = Literal["policy", "kl", "entropy"]
Filter = Literal["finished", "signal", "positive", "negative"]


class Warmup(Section):
    """Supervised training on prompt and answer before reinforcement learning begins."""

    steps: PositiveInt
    """Optimizer steps."""
    rows_per_step: PositiveInt = 64
    """Examples in each step."""
    lr: Positive = 1e-3
    """Peak learning rate of the warm-up, under the schedule of `train`."""
    answers: Annotated[list[str], Field(min_length=1)] | None = None
    """Templates of demonstrated answers, one drawn for each example; by default `data.answer` alone."""


class Critic(Section):
    """The model whose values `advantage: gae` is made of: a language model with a value head that starts at zero."""

    path: str | None = None
    """Folder in Hugging Face format, with the policy's tokenizer; by default the model that training begins with."""
    lr: Positive = 1e-5
    """Learning rate."""
    clip: Positive | None = 0.2
    """A value counts as moved by at most this from the one that the advantages were made of; null: by any."""
    warmup: Count = 0
    """First steps in which the critic alone learns: the policy's learning rate is 0."""


class Train(Section):
    """How the policy is trained."""

    backend: str = "torch"
    """Training engine: `torch`, `emulated`, or one registered under the entry point group `asyncflow.train`."""
    algorithm: Algorithm = "grpo"
    """A recipe: names the values of the options from `advantage` on, each of which can be overridden. One that has no
    effect is refused. `sft` trains on given answers instead, and has none of them."""
    data_parallel: PositiveInt = 1
    """Processes of the training engine, each with a whole model and a share of every step's rows."""
    group_size: PositiveInt = 8
    """Responses to each prompt."""
    prompts_per_step: PositiveInt | None = None
    """Prompts in one optimizer step; by default 32, or `rows_per_step / group_size`."""
    rows_per_step: PositiveInt | None = None
    """Instead of `prompts_per_step`: responses in one optimizer step, a multiple of `group_size`; with `sft` examples.
    """
    answers: Annotated[list[str], Field(min_length=1)] | None = None
    """Templates of demonstrated answers for `sft`, one drawn for each example; by default `data.answer` alone."""
    steps: PositiveInt = 100
    """Optimizer steps, those of a warm-up not counted."""
    lr: Positive = 1e-6
    """Peak learning rate."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Course of the learning rate after `lr_warmup` steps; linear and cosine end at zero."""
    lr_warmup: Count = 0
    """Steps over which the learning rate rises from zero."""
    betas: tuple[Share, Share] = (0.9, 0.999)
    """AdamW's decay rates."""
    eps: Positive = 1e-8
    """AdamW's epsilon."""
    weight_decay: NonNegative = 0.0
    """AdamW's decoupled weight decay, on matrices only."""
    max_grad_norm: Positive = 1.0
    """Gradients are scaled down to this global norm."""
    token_budget: PositiveInt = 8192
    """Most tokens in one micro-batch; padding counts, unless rows are packed."""
    packing: Flag = False
    """Put the rows of a micro-batch one after another, without padding, each with its own positions and attention;
    the numbers are the same. The engine `torch` can, and refuses a model that cannot be packed."""
    advantage: str = "grpo"
    """`grpo`, `dr_grpo`, `rloo`, `maxrl`, `reinforce++`, `reinforce++-baseline`, `gae` (with a critic), `none`, or
    `module:function` of your own: (rewards, groups) -> advantages."""
    std: Literal["unbiased", "biased"] = "unbiased"
    """Which standard deviation normalises a group (GRPO)."""
    gamma: Unit = 1.0
    """Discount from one token to the next (REINFORCE++, GAE)."""
    gae_lambda: Unit = 1.0
    """GAE's exponential weight."""
    whiten: Flag = False
    """Bring the advantages of a step to mean 0 and variance 1, over all trained tokens."""
    distill_coef: NonNegative = 0.0
    """Weight of the teacher in the advantage: on-policy distillation; 0 needs no teacher."""
    loss: str = "ppo"
    """`ppo`, `gspo`, `gspo-token`, `cispo`, `pg`, or `module:function` of your own, called as those are."""
    clip_low: Positive = 0.2
    """The probability ratio is clipped below at 1 - this; 1 or more switches the bound off."""
    clip_high: Positive = 0.2
    """The probability ratio is clipped above at 1 + this."""
    dual_clip: Annotated[Float, Field(gt=1)] | None = None
    """Where an advantage is negative, its loss is at most this many times it."""
    kl_coef: NonNegative = 0.0
    """Weight of the KL divergence from the reference model; 0 needs no reference."""
    kl: Literal["k1", "k2", "k3"] = "k3"
    """Estimator of that divergence."""
    kl_in: Literal["loss", "reward"] = "loss"
    """Whether it is added to the loss, or taken off the reward."""
    kl_unbiased: Flag = False
    """Multiply the estimate by the probability ratio, so that its gradient is unbiased for data of another policy."""
    entropy_coef: NonNegative = 0.0
    """Weight of the entropy bonus."""
    aggregate: Aggregate = "token-mean"
    """How token losses become one number."""
    aggregate_length: PositiveInt | None = None
    """The constant length of `seq-mean-token-sum-norm`; by default `rollout.max_response_tokens`."""
    filters: dict[Component, list[Filter]] = {}
    """Which rows a part of the loss leaves out, for example `{policy: [finished]}`: it has those alone that are
    `finished`, have a `signal` (an advantage that is not 0), or a `positive` or `negative` advantage."""
    dynamic_sampling: Count = 0
    """Replace groups whose rewards are all equal; a step that loses this many times its groups is given up. 0: off."""
    overlong: Share = 0.0
    """Share of `rollout.max_response_tokens` over which a response that nears it loses up to 1 of its reward."""
    off_policy: Literal["none", "decoupled", "tis", "icepop", "reject", "a3po"] = "none"
    """Correction for what an older version, or another engine, made."""
    off_policy_level: Literal["token", "sequence"] = "token"
    """Whether TIS weighs each token by its own ratio, or by that of its whole response."""
    off_policy_low: Float = 0.0
    """Lower bound of the ratio, or of the metric; of k1, which has either sign, to be given."""
    off_policy_high: Positive = 2.0
    """Upper bound of the ratio, or of the metric."""
    off_policy_metric: Literal["ratio", "k1", "k2", "k3"] = "ratio"
    """What `reject` looks at."""
    off_policy_reduce: Literal["token", "sum", "mean", "max"] = "token"
    """Whether `reject` looks at each token, or at a response as a whole."""
    reward: str = "reward"
    """Column that the advantage is computed from: `reward`, or one that a stage of your own writes."""
    options: dict[str, Any] = {}
    """Passed on to the engine."""

    @model_validator(mode="after")
    def _recipe(self) -> Self:
        """Fill in what the recipe has of its own; it does not count as given."""
        given = {name: getattr(self, name) for name in self.model_fields_set}
        self.__dict__.update(resolve(self.algorithm, given))
        if self.supervised:
            self.__dict__["group_size"] = 1
        return self

    @property
    def supervised(self) -> bool:
        """Whether training is on given answers, and nothing is generated for it."""
        return self.algorithm in SUPERVISED

    @property
    def algorithm_options(self) -> dict[str, object]:
        """The value of every option of the algorithm."""
        return {name: getattr(self, name) for name in BASE}
