"""From a configuration to the stages of each table, checked as graphs.

Three tables: `train` holds the rows of reinforcement learning, or of supervised training instead, `eval` held-out
prompts, `warmup` supervised examples. In the modes `colocated` and `separated` every stage takes a whole phase at a
time (`whole`), so that each phase waits for the whole phase before it. In the others it takes what is ready: the
engines a group at a time, many at once, and the trainer group by group until a step is full.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from asyncflow.algorithms.options import by_token, filter_names, scores
from asyncflow.backends import names
from asyncflow.backends.costs import InferCosts, TrainCosts
from asyncflow.config.importing import resolve
from asyncflow.config.model import Pipeline
from asyncflow.config.model import Stage as StageConfig
from asyncflow.errors import ConfigError, PipelineError
from asyncflow.pipeline import Graph, StageSpec, Take, awaited, graph
from asyncflow.storage.schema import Schema, dtype

PROMPT_COLUMNS = {
    "prompt_text": "string",
    "prompt_tokens": "list<int64>",
    "answer_text": "string",
    "item": "string",
    "temperature": "float32",
    "seed": "int64",
    "requeued": "int32",
}
RESPONSE_COLUMNS = {
    "response_text": "string",
    "response_tokens": "list<int64>",
    "response_mask": "list<uint8>",
    "rollout_logprobs": "list<float32>",
    "versions": "list<int32>",
    "finish": "string",
}
REWARD_COLUMNS = {"reward": "float64", "reward_outcome": "string"}
EXAMPLE_COLUMNS = {"prompt_tokens": "list<int64>", "response_tokens": "list<int64>", "response_mask": "list<uint8>"}
"""Of supervised examples: the response is a given answer."""
TRAINED_COLUMNS = {"trained_by": "int64", "staleness": "int32", "trained_mask": "list<uint8>"}
"""What the trainer writes where it takes rows as they come: the version that they made, how old they were, and which
response tokens were in the loss."""
_PHASE = Take(whole=True)
_GROUPS = 64
"""Most groups that a stage takes at once where it takes what is ready: enough to make the price of a call small."""

_GROUPS_PER_FIT = 4
"""How much longer than the mean response the longest of a group may be, for the engine to be full all the time."""

_EVAL_LANES = 64
"""Most batches of held-out prompts that an engine works on at once; with more room than that each has several."""

_ROWS_PER_RANK = 4
"""Rows that each rank of the trainer gets at least, if a step has as many: shares of fewer are less even."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The stages of a run by table."""

    tables: Mapping[str, Graph]

    @property
    def stages(self) -> tuple[StageSpec, ...]:
        """All of them, sources included."""
        return tuple(stage for found in self.tables.values() for stage in found.stages)


def plan(config: Pipeline) -> Plan:
    """Derive the stages of every table, or raise PipelineError with each fault of the graph."""
    for kind, name in (("infer", config.rollout.backend), ("train", config.train.backend)):
        if name not in names(kind):
            raise ConfigError(f"{kind} backend {name!r} does not exist; there are {', '.join(names(kind))}")
    if config.rollout.backend == "emulated":
        InferCosts.of(config.rollout.options)
        TrainCosts.of(config.train.options)
    tables = {"train": graph(_sft(config) if config.train.supervised else _train(config))}
    for found in tables.values():
        Schema(dict(found.columns))
    if not config.train.supervised:
        reward = dtype(tables["train"].columns[config.train.reward])
        if reward.ragged or reward.shape or reward.item.kind not in "biuf":
            raise PipelineError(
                f"train.reward: column {config.train.reward} is {reward.name}, not one number for each row"
            )
    if config.eval.rows:
        tables["eval"] = graph(_eval(config))
    if config.warmup:
        tables["warmup"] = graph(_warmup(config))
    return Plan(tables)


def _source(table: str, columns: Mapping[str, str]) -> StageSpec:
    return StageSpec("source", (), columns, table=table)


def _ready(config: Pipeline, *, groups: bool = False) -> Take:
    """Return what a stage between rollout and training takes: a phase, or the rows or whole groups that are ready."""
    if config.phased:
        return _PHASE
    return Take(groups=_GROUPS, partial=True) if groups else Take(rows=_GROUPS * config.train.group_size, partial=True)


def _rollout(config: Pipeline, table: str) -> StageSpec:
    replicas = config.rollout.replicas
    rows = None if replicas == 1 else -(-config.rows_per_step // replicas)
    take, lanes = Take(rows=rows, whole=True), 1
    if config.flows:
        take, lanes = (Take(groups=1), _lanes(config)) if table == "train" else _held_out(config)
    return StageSpec(
        "rollout",
        ("prompt_tokens", "temperature", "seed"),
        RESPONSE_COLUMNS,
        build="asyncflow.stages.rollout:Rollout",
        table=table,
        host="rollout",
        replicas=replicas,
        take=take,
        lanes=lanes,
        paced=table == "train",
    )


def _lanes(config: Pipeline) -> int:
    """Groups that an engine may have under way: more than fit, since of most of them only the longest still run."""
    most = config.rollout.max_inflight
    return min(most, _GROUPS_PER_FIT * -(-most // config.train.group_size))


def _held_out(config: Pipeline) -> tuple[Take, int]:
    """Return what a lane takes, and how many there are, so that an engine that has nothing else to do is full."""
    prompts = -(-config.rollout.max_inflight // config.eval.samples)
    lanes = min(prompts, _EVAL_LANES)
    groups = -(-prompts // lanes)
    return Take(groups=groups, partial=groups > 1), lanes


def _reward(config: Pipeline, table: str) -> StageSpec:
    reads = ("prompt_text", "response_text", "answer_text", "item")
    return StageSpec(
        "reward", reads, REWARD_COLUMNS, build="asyncflow.stages.reward:Reward", table=table, take=_ready(config)
    )


def _frozen(name: str, column: str, config: Pipeline) -> StageSpec:
    return StageSpec(
        name,
        ("prompt_tokens", "response_tokens", "response_mask"),
        {column: "list<float32>"},
        build=f"asyncflow.stages.{name}:{name}",
        host=name,
        take=_ready(config, groups=config.deterministic),
    )


def _critic(config: Pipeline) -> StageSpec:
    ranks = config.train.data_parallel
    share = Take(groups=-(-config.prompts_per_step // ranks), whole=True)
    return StageSpec(
        "critic",
        ("prompt_tokens", "response_tokens", "response_mask"),
        {"values": "list<float32>"},
        build="asyncflow.stages.critic:Critic",
        host="trainer",
        replicas=ranks,
        take=share if config.phased else _ready(config),
    )


def _advantage(config: Pipeline) -> StageSpec:
    options = config.train.algorithm_options
    token = "list<float32>"
    writes = {"advantage": token if by_token(options) else "float64"}
    if config.train.advantage == "gae":
        writes["returns"] = token
    return StageSpec(
        "advantage",
        (config.train.reward, *scores(options)),
        writes,
        build="asyncflow.stages.advantage:Advantage",
        host="trainer",
        replicas=config.train.data_parallel,
        take=_ready(config, groups=True),
    )


def _train(config: Pipeline) -> list[StageSpec]:
    reads = ["prompt_tokens", "response_tokens", "response_mask", "rollout_logprobs", "versions"]
    reads += [*REWARD_COLUMNS, "advantage"]
    options = config.train.algorithm_options
    if "finished" in filter_names(options):
        reads.append("finish")
    stages = [_source("train", PROMPT_COLUMNS), _rollout(config, "train"), _reward(config, "train")]
    if config.train.kl_coef > 0:
        stages.append(_frozen("reference", "ref_logprobs", config))
        reads.append("ref_logprobs")  # for the loss, or to tell how far the policy is from it
    if config.train.distill_coef > 0:
        stages.append(_frozen("teacher", "teacher_logprobs", config))
        reads.append("teacher_logprobs")  # to tell how far the policy is from it
    if config.critic is not None:
        stages.append(_critic(config))
        reads += ["values", "returns"]
    stages.append(_advantage(config))
    stages += _with_own([_own(stage, _ready(config, groups=True)) for stage in config.stages], stages, config, reads)
    if config.output.samples_every:
        columns = ("prompt_text", "response_text", "answer_text", "finish", "versions", *REWARD_COLUMNS, "advantage")
        added, take = tuple(TRAINED_COLUMNS), _ready(config)
        if config.phased:
            # As the trainer does, after all that may drop a row: a step's file has the rows of the step.
            added = tuple(name for name in stages[-1].reads if name not in (*reads, "requeued"))
            take = Take(groups=config.prompts_per_step)
        stages.append(
            StageSpec("samples", (*columns, *added), build="asyncflow.stages.samples:Samples", take=take, drops=False)
        )
    return stages


def _with_own(
    own: Sequence[StageSpec], stages: Sequence[StageSpec], config: Pipeline, reads: Sequence[str]
) -> list[StageSpec]:
    """Return the user's stages and the trainer, which gets a row when all have had it that may drop it.

    A row that is dropped is replaced; one that is trained must not be. So those that come after the trainer, or
    write nothing that it could wait for, drop nothing.
    """
    trainer = _trainer(config, tuple(reads))
    every = (*stages, *own, trainer)
    before = awaited(every, trainer.name)
    late = {stage.name for stage in own if not stage.writes or trainer.name in awaited(every, stage.name)}
    beside = [stage for stage in own if stage.name not in before | late]
    earlier = set().union(*(awaited(every, stage.name) for stage in beside))
    # A stage writes all columns of a row at once, so that the smallest tells enough.
    waits = [
        min(stage.writes, key=lambda name: "<" in stage.writes[name]) for stage in beside if stage.name not in earlier
    ]
    trainer = replace(trainer, reads=(*trainer.reads, *waits))
    return [*(replace(stage, drops=stage.name not in late) for stage in own), trainer]


def _trainer(config: Pipeline, reads: tuple[str, ...]) -> StageSpec:
    phased = config.phased
    whole = phased or config.deterministic
    few = Take(groups=_few(config), ordered=config.on_stale == "wait")
    return StageSpec(
        "train",
        reads if phased else (*reads, "requeued"),
        {} if phased else TRAINED_COLUMNS,
        build="asyncflow.stages.train:Train",
        host="trainer",
        take=Take(groups=config.prompts_per_step) if whole else few,
        durable=True,
        gathers=not phased,
        replicas=config.train.data_parallel,
        ranks=config.train.data_parallel,
    )


def _few(config: Pipeline) -> int:
    """Groups that the trainer takes at once where stages overlap: one, or so many that each rank gets some rows.

    Steps are made of them without a rest. Where groups may leave at the trainer, a step can lack any number.
    """
    ranks, size = config.train.data_parallel, config.train.group_size
    if ranks == 1 or (config.mode == "async" and config.on_stale in ("drop", "requeue")):
        return 1
    groups = config.prompts_per_step
    enough = (few for few in range(1, groups) if groups % few == 0 and few * size >= _ROWS_PER_RANK * ranks)
    return next(enough, groups)


def _eval(config: Pipeline) -> list[StageSpec]:
    collect = StageSpec(
        "evaluate",
        (*REWARD_COLUMNS, "response_text", "versions"),
        build="asyncflow.stages.evaluate:Evaluate",
        table="eval",
        take=Take(partial=True, rows=1024),
        drops=False,
    )
    return [_source("eval", PROMPT_COLUMNS), _rollout(config, "eval"), _reward(config, "eval"), collect]


def _warmup(config: Pipeline) -> list[StageSpec]:
    assert config.warmup is not None
    warmup = StageSpec(
        "warmup",
        tuple(EXAMPLE_COLUMNS),
        build="asyncflow.stages.warmup:Warmup",
        replicas=config.train.data_parallel,
        ranks=config.train.data_parallel,
        table="warmup",
        host="trainer",
        take=Take(rows=config.warmup.rows_per_step),
    )
    return [_source("warmup", EXAMPLE_COLUMNS), warmup]


def _sft(config: Pipeline) -> list[StageSpec]:
    sft = StageSpec(
        "train",
        tuple(EXAMPLE_COLUMNS),
        build="asyncflow.stages.sft:Sft",
        replicas=config.train.data_parallel,
        ranks=config.train.data_parallel,
        host="trainer",
        take=Take(rows=config.rows_per_step),
        durable=True,
    )
    return [_source("train", EXAMPLE_COLUMNS), sft]


def _own(stage: StageConfig, take: Take) -> StageSpec:
    reads, writes = stage.reads, stage.writes
    if reads is None or writes is None:
        function = resolve(stage.fn)
        reads = reads if reads is not None else getattr(function, "asyncflow_reads", None)
        writes = writes if writes is not None else getattr(function, "asyncflow_writes", None)
    if reads is None or writes is None:
        raise PipelineError(
            f"stage {stage.fn} does not say which columns it reads and writes: "
            "decorate it with @asyncflow.stage.stage(reads=…, writes=…), or give reads and writes in the file"
        )
    name = stage.fn.rpartition(":")[2]
    return StageSpec(name, tuple(reads), dict(writes), build=stage.fn, options=stage.options, take=take)
