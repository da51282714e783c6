"""The typed model of pipeline.yaml: one frozen class for each section, one documented line for each field.

Nothing here loads torch, an engine or the data; the model knows which values are possible, `check` (beside it)
knows which values go together, and `load` turns files and overrides into it.
"""

from typing import Any, Literal, Self

from pydantic import Field, model_validator

from asyncflow.config.fields import (
    Count,
    Flag,
    Float,
    Int,
    NonNegative,
    OnOutcome,
    OnStale,
    Positive,
    PositiveInt,
    Seconds,
    Section,
    Unit,
)
from asyncflow.config.training import Critic, Train, Warmup


class Model(Section):
    """Which model is trained: a folder in Hugging Face format, or a config from which a new one is made."""

    path: str | None = None
    """Folder in Hugging Face format with weights, config and tokenizer."""
    config: dict[str, Any] | None = None
    """Instead of `path`: keys of a Hugging Face config, with `model_type`; the weights are initialised anew."""
    tokenizer: str | None = None
    """`characters`, or a folder in Hugging Face format; by default the tokenizer of `path`."""
    characters: str = " !\"'()*+,-./0123456789:;<=>?abcdefghijklmnopqrstuvwxyz"
    """Alphabet of the `characters` tokenizer; each character is one token, others become the unknown token."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the weights and of the computation."""


class Data(Section):
    """Where prompts come from."""

    source: str
    """`jsonl:FILE`, `parquet:FILE`, `reasoning_gym:TASK`, or `python` for a dataset handed over in Python."""
    options: dict[str, Any] = {}
    """Passed on to the source, for example the difficulty of a reasoning-gym task."""
    size: PositiveInt | None = None
    """How many items to take; a generated source needs it."""
    prompt: str = "{prompt}"
    """Template of the prompt over the item's fields, for example `{question}` or `{metadata[word]}`."""
    answer: str = "{answer}"
    """Template of the reference answer: what a warm-up trains towards, and what many rewards compare with."""
    max_prompt_tokens: PositiveInt = 512
    """Longest prompt in tokens."""
    on_long: Literal["error", "drop"] = "error"
    """What to do with a longer prompt: refuse the data, or leave the item out and say how many."""
    shuffle: Flag = True
    """Draw a new order for each epoch, from the seed."""


class Eval(Section):
    """Held-out prompts: answered before and after training, never trained on."""

    source: str | None = None
    """A source of its own; by default `rows` prompts are held out of `data.source`."""
    rows: Count = 0
    """How many held-out prompts; 0 switches evaluation off."""
    every: Count = 0
    """Evaluate again each time so many steps were trained; 0: only before and after."""
    temperature: NonNegative = 0.0
    """Sampling temperature of evaluation; 0 is greedy."""
    correct_at: Float = 1.0
    """A response counts as correct when its reward is at least this."""
    samples: PositiveInt = 1
    """Responses to each held-out prompt; several need a temperature above 0."""
    k: list[PositiveInt] = []
    """For which numbers of samples `pass@k`, `mean@k` and `maj@k` are told; by default for `samples` alone."""
    answer: str | None = None
    """`module:function` or `file.py:function` that finds the answer in the text of a response, or None, for `maj@k`;
    by default the text itself, without the space around it."""
    max_inflight: PositiveInt | None = None
    """Most held-out responses that are generated at once while training goes on beside them (modes `streaming` and
    `async`); by default a quarter of what the engines work on, and at least `samples`."""


class Teacher(Section):
    """The model that is distilled into the policy, with `train.distill_coef`: it says of each token of a response how
    likely it is."""

    path: str
    """Folder in Hugging Face format, with the vocabulary of the policy."""


class Rollout(Section):
    """How responses are generated."""

    backend: str = "transformers"
    """Inference engine: `transformers`, `emulated` (takes the time that a cost model says, and makes tokens up), or one
    registered under the entry point group `asyncflow.infer`."""
    replicas: PositiveInt = 1
    """Running copies of the engine, each a process."""
    temperature: Positive = 1.0
    """Sampling temperature; log-probabilities are taken at it, here and in training."""
    top_p: Unit = 1.0
    """Keep the smallest set of tokens with at least this probability; 1 keeps all."""
    top_k: Int = Field(default=-1, ge=-1)
    """Keep this many likeliest tokens; -1 keeps all."""
    max_response_tokens: PositiveInt = 256
    """Budget of a whole response, in tokens."""
    max_inflight: PositiveInt = 64
    """Most requests that one engine works on at a time."""
    stop: list[str] = []
    """Strings of exactly one token that end a response, beside the end-of-sequence token."""
    options: dict[str, Any] = {}
    """Passed on to the engine."""


class Reward(Section):
    """How responses are scored."""

    fn: str
    """`module:function`, `file.py:function`, or a built-in: `exact_match`, `char_match`, `reasoning_gym`."""
    timeout: Seconds = 5.0
    """Wall-clock time that one response may take to score, for example `5s`."""
    on_timeout: OnOutcome = "drop"
    """A response whose scoring took too long leaves with that reason, scores 0, is scored again, or ends the run."""
    on_error: OnOutcome = "drop"
    """The same for one for which the function raised an error."""
    on_unscored: OnOutcome = "drop"
    """The same for one for which the function returned no score."""
    retries: PositiveInt = 2
    """How often a response is scored again with `retry`, before it leaves."""
    workers: PositiveInt = 1
    """Processes that score; one that hangs is killed and replaced."""
    options: dict[str, Any] = {}
    """Keyword arguments of the function."""


class Weights(Section):
    """How new weights reach the rollout engines."""

    channel: Literal["file", "shm", "tcp", "collective", "inproc"] = "file"
    """`file`: safetensors in the run's folder; `shm`: shared memory of one host; `tcp`: engines fetch them, also from
    other hosts; `collective`: a broadcast by torch.distributed; `inproc`: within one process."""
    apply: Literal["interrupt", "drain", "boundary"] = "interrupt"
    """When an engine takes new weights: `interrupt` between two tokens, `drain` when the responses that run have ended,
    and nothing begins before, `boundary` when the prompts that are being answered are answered."""
    kv: Literal["keep", "recompute"] = "keep"
    """Keys and values of a response that is interrupted: `keep` them, or `recompute` them by the new weights."""
    delta: Flag = False
    """Send only the tensors that differ from those that an engine has; it keeps them once more, in host memory."""
    host: str = "127.0.0.1"
    """Address of the trainer's host that `tcp` and `collective` listen on, and engines connect to."""
    timeout: Seconds = 60.0
    """Longest wait for an engine to take new weights."""


class Executor(Section):
    """Where stages run."""

    kind: Literal["local"] = "local"
    """`local`: processes and threads of this machine."""
    threads: PositiveInt | None = None
    """Compute threads of each engine; by default all cores when colocated, else the cores shared out."""
    start_timeout: Seconds = 300.0
    """Longest wait for a replica to be ready."""
    wait_timeout: Seconds = 3600.0
    """Longest time that a stage waits for rows; then the run ends with an error that says what was missing."""
    stop_timeout: Seconds = 30.0
    """Longest wait for a replica to end by itself; then it is killed."""
    max_restarts: Count = 3
    """How often in a row a replica that fails is started again, but for the trainer's; 0: its failure ends the run."""
    stall_timeout: Seconds = 600.0
    """When nothing has moved for so long, a warning says what is missing; at most half of `wait_timeout` counts."""


class Stage(Section):
    """A stage of the user's own."""

    fn: str
    """`module:function` or `file.py:function`, with `reads` and `writes` here or by the decorator `stage`."""
    reads: list[str] | None = None
    """Columns that it reads; by default those of the decorator."""
    writes: dict[str, str] | None = None
    """Columns that it writes, with their dtypes; by default those of the decorator."""
    options: dict[str, Any] = {}
    """Keyword arguments of the function."""


class Output(Section):
    """What a run leaves behind."""

    folder: str = "runs/run"
    """Folder of the run; a number is appended when it already holds one."""
    samples_every: Count = 10
    """Write prompts, responses and rewards of each so-manieth step as Parquet; 0: never."""
    checkpoint_every: Count = 0
    """Write a checkpoint each so many steps; there is always one at the end."""
    keep_checkpoints: PositiveInt = 2
    """How many of those to keep."""
    trace: Flag = True
    """Write down when each replica worked and waited; `asyncflow trace` shows it."""


class Pipeline(Section):
    """A whole run."""

    model: Model
    """Which model is trained."""
    data: Data
    """Where prompts come from."""
    reward: Reward
    """How responses are scored."""
    rollout: Rollout = Rollout()
    """How responses are generated."""
    train: Train = Train()
    """How the policy is trained."""
    critic: Critic | None = None
    """The model of values for `train.advantage: gae`; none with any other."""
    warmup: Warmup | None = None
    """Supervised training before reinforcement learning; none by default."""
    teacher: Teacher | None = None
    """The model that is distilled into the policy; none by default."""
    eval: Eval = Eval()
    """Held-out prompts."""
    stages: list[Stage] = []
    """Stages of the user's own; where they stand follows from the columns they read and write."""
    mode: Literal["colocated", "separated", "streaming", "async"] = "separated"
    """`colocated`: all stages share the devices, in turns; `separated`: each engine has its own; `streaming`: rows go
    on as soon as they are ready; `async`: the same, and the next steps' responses begin before this one is trained."""
    max_staleness: Count | None = None
    """How many versions a trained token may be older than the version being trained; by default 1 in mode `async`.
    In all other modes it is 0."""
    on_stale: OnStale = "mask"
    """What becomes of a row that would be older: `mask` takes its stale tokens out of the loss, `drop` lets it go,
    `requeue` generates its group anew, `wait` trains in the order of admission, so that none is ever too old."""
    max_requeues: Count = 2
    """How often a group may be generated anew; then it is dropped."""
    deterministic: Flag = False
    """Every order follows the rows and not what is finished first: the same seed gives the same metrics in every mode
    but `async`, and after an interruption. Engines work on one batch at a time, with as many threads in every mode."""
    run_ahead: PositiveInt | None = None
    """Begin nothing while responses for so many steps are finished and not trained; by default no such limit."""
    weights: Weights = Weights()
    """How new weights reach the rollout engines."""
    executor: Executor = Executor()
    """Where stages run."""
    seed: Int = Field(default=0, ge=0, lt=2**31)
    """Seed of everything random."""
    output: Output = Output()
    """What a run leaves behind; a plain string is its folder."""

    @model_validator(mode="after")
    def _critic(self) -> Self:
        """Make the critic that GAE needs; it does not count as given."""
        if self.critic is None and self.train.advantage == "gae":
            self.__dict__["critic"] = Critic()
        return self

    @property
    def staleness(self) -> int:
        """The bound that holds: `max_staleness`, or what the mode has by default."""
        return self.max_staleness if self.max_staleness is not None else int(self.mode == "async")

    @property
    def phased(self) -> bool:
        """Whether each stage waits for the whole phase before it."""
        return self.mode in ("colocated", "separated")

    @property
    def flows(self) -> bool:
        """Whether rows go on as soon as they are ready, in whichever order that is."""
        return not self.phased and not self.deterministic

    @property
    def takes_turns(self) -> bool:
        """Whether engines apply new weights one after another; not where all of them are waited for."""
        return self.mode == "async" and self.on_stale != "wait" and self.rollout.replicas > 1

    @property
    def prompts_per_step(self) -> int:
        """Prompts in one optimizer step."""
        if self.train.prompts_per_step is not None:
            return self.train.prompts_per_step
        if self.train.rows_per_step is not None:
            return self.train.rows_per_step // self.train.group_size
        return 32

    @property
    def rows_per_step(self) -> int:
        """Responses in one optimizer step."""
        return self.prompts_per_step * self.train.group_size
