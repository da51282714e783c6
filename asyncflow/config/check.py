"""What goes together: checks over the fields of a pipeline, each problem with the path of the field to mend.

Nothing is imported or read here but names and sizes: files and modules are looked for, the user's code does not run.
"""

import importlib.util
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from asyncflow.algorithms.options import ADVANTAGES, BY_GROUP, LOSSES, is_path, kl_in_reward, unused
from asyncflow.config import importing, vocabulary
from asyncflow.config.document import Route
from asyncflow.config.model import Pipeline
from asyncflow.config.names import hint, nearest
from asyncflow.config.sources import FILE_SCHEMES, GENERATED_SCHEMES, SCHEMES, scheme
from asyncflow.config.training import Train
from asyncflow.data.template import Template
from asyncflow.errors import ConfigError

BUILT_IN_REWARDS = ("exact_match", "char_match", "reasoning_gym")


@dataclass(frozen=True, slots=True)
class Problem:
    """One mistake, and where it is."""

    route: Route
    message: str
    uses: tuple[Route, ...] = ()
    """Other fields that the message rests on: it says nothing while one of them is wrong itself."""
    at: Literal["key", "value"] = "value"


def check(pipeline: Pipeline) -> list[Problem]:
    """Return every mistake that shows only when fields are seen together."""
    model = (_model, _data, _stop, _eval, _reward, _retries, _stages)
    training = (_batch, _algorithm, _supervised, _teacher, _critic, _schedule, _staleness, _emulated, _packing)
    running = (_weights, _channel, _stall)
    return [problem for part in (*model, *training, *running) for problem in part(pipeline)]


def _model(pipeline: Pipeline) -> Iterator[Problem]:
    model = pipeline.model
    if model.path is None and model.config is None:
        yield Problem(("model",), "give `path` (a folder) or `config` (a new model)", at="key")
    elif model.path is not None and model.config is not None:
        yield Problem(("model", "config"), "`path` and `config` are both given: give one", at="key")
    if model.path is not None:
        yield from _folder(("model", "path"), model.path)
    if model.config is not None:
        if "model_type" not in model.config:
            yield Problem(("model", "config"), "needs `model_type`, for example `model_type: llama`", at="key")
        if model.tokenizer is None:
            needs = "a new model needs `model.tokenizer`: `characters`, or a folder"
            yield Problem(("model",), needs, uses=(("model", "tokenizer"),), at="key")
    yield from _tokenizer(pipeline)


def _tokenizer(pipeline: Pipeline) -> Iterator[Problem]:
    model = pipeline.model
    if model.tokenizer == "characters":
        twice = sorted({letter for letter in model.characters if model.characters.count(letter) > 1})
        if twice or not model.characters:
            what = f"{', '.join(map(repr, twice))} twice" if twice else "empty"
            yield Problem(("model", "characters"), f"each character of the alphabet once, found {what}")
        return
    if "characters" in model.model_fields_set:
        why = "has no effect without `tokenizer: characters`"
        yield Problem(("model", "characters"), why, uses=(("model", "tokenizer"),), at="key")
    if model.tokenizer is not None:
        near = nearest(model.tokenizer, ["characters"])
        yield from _folder(("model", "tokenizer"), model.tokenizer, "characters" if near else None)


def _folder(route: Route, path: str, near: str | None = None) -> Iterator[Problem]:
    folder = Path(path)
    if not path or folder.is_dir():
        return
    if near:
        yield Problem(route, f"no folder {path!r} - did you mean {near!r}?")
    elif folder.exists():
        yield Problem(route, f"{path} is a file: expected a folder in Hugging Face format")
    else:
        yield Problem(route, f"{importing.missing(folder)} (models are folders here, nothing is downloaded)")


def _data(pipeline: Pipeline) -> Iterator[Problem]:
    data = pipeline.data
    yield from _source(("data", "source"), data.source)
    kind, _ = scheme(data.source)
    if kind in GENERATED_SCHEMES and data.size is None:
        yield Problem(("data", "source"), f"{kind} makes items without end: give `data.size`", uses=(("data", "size"),))
    for route, template in _templates(pipeline):
        try:
            Template(template)
        except ConfigError as error:
            yield Problem(route, str(error))
    if data.options and kind in (*FILE_SCHEMES, "python"):
        yield Problem(("data", "options"), f"{kind} takes no options", uses=(("data", "source"),), at="key")


def _templates(pipeline: Pipeline) -> Iterator[tuple[Route, str]]:
    yield ("data", "prompt"), pipeline.data.prompt
    yield ("data", "answer"), pipeline.data.answer
    for name, section in (("warmup", pipeline.warmup), ("train", pipeline.train)):
        for number, template in enumerate((section.answers if section else None) or ()):
            yield (name, "answers", number), template


def _stop(pipeline: Pipeline) -> Iterator[Problem]:
    known = set(pipeline.model.characters)
    for number, text in enumerate(pipeline.rollout.stop):
        if pipeline.model.tokenizer == "characters" and text not in known:
            yield Problem(("rollout", "stop", number), f"{text!r} is not one of the characters of this tokenizer")


def _source(route: Route, source: str) -> Iterator[Problem]:
    kind, rest = scheme(source)
    if not source:
        return
    if kind not in SCHEMES:
        shapes = "; use `jsonl:FILE`, `parquet:FILE`, `reasoning_gym:TASK` or `python`"
        near = hint(kind, SCHEMES) if ":" in source else shapes
        yield Problem(route, f"unknown kind of source {kind!r}{near}")
    elif kind == "python":
        if rest:
            yield Problem(route, "`python` takes nothing behind it: the dataset is handed over in Python")
    elif not rest:
        yield Problem(route, f"expected `{kind}:{'FILE' if kind in FILE_SCHEMES else 'TASK'}`")
    elif kind in FILE_SCHEMES and Path(rest).is_dir():
        yield Problem(route, f"{rest} is a folder: expected a file")
    elif kind in FILE_SCHEMES and not Path(rest).is_file():
        yield Problem(route, importing.missing(Path(rest)))
    elif kind == "reasoning_gym" and importlib.util.find_spec("reasoning_gym") is None:
        install = "pip install 'asyncflow-rl[tasks]'"
        yield Problem(route, f"needs the package reasoning-gym, which is not installed: {install}")


def _eval(pipeline: Pipeline) -> Iterator[Problem]:
    section, size = pipeline.eval, pipeline.data.size
    if section.source is not None:
        yield from _source(("eval", "source"), section.source)
    elif size is not None and section.rows >= size:
        left = f"{section.rows} held-out prompts of data.size {size} leave none to train on"
        yield Problem(("eval", "rows"), left, uses=(("data", "size"), ("eval", "source")))
    if section.answer:
        yield from _function(("eval", "answer"), section.answer)
    if section.samples > 1 and section.temperature == 0:
        why = f"{section.samples} responses at temperature 0 would all be the same: give `eval.temperature`"
        yield Problem(("eval", "samples"), why, uses=(("eval", "temperature"),))
    for number, k in enumerate(section.k):
        if k > section.samples:
            why = f"{k} is more than eval.samples {section.samples}: raise that, or use at most as many"
            yield Problem(("eval", "k", number), why, uses=(("eval", "samples"),))
    if section.max_inflight is not None and section.max_inflight < section.samples:
        why = f"{section.max_inflight} is less than eval.samples {section.samples}, which begin together: use as many"
        yield Problem(("eval", "max_inflight"), why, uses=(("eval", "samples"),))
    yield from _idle(pipeline)


def _idle(pipeline: Pipeline) -> Iterator[Problem]:
    """Settings of evaluation that nothing follows from."""
    section = pipeline.eval
    fields = type(section).model_fields
    names = ("source", "every", "samples", "k", "answer", "max_inflight")
    chosen = [name for name in names if getattr(section, name) != fields[name].default]
    for name in chosen:
        if section.rows == 0:
            yield Problem(("eval", name), "has no effect while eval.rows is 0", uses=(("eval", "rows"),), at="key")
        elif name == "answer" and section.samples == 1:
            why = "has no effect while eval.samples is 1: one response has no majority"
            yield Problem(("eval", name), why, uses=(("eval", "samples"),), at="key")
        elif name == "max_inflight" and not section.every:
            why = "has no effect without eval.every: nothing is trained beside the other evaluations"
            yield Problem(("eval", name), why, uses=(("eval", "every"),), at="key")
        elif name == "max_inflight" and not pipeline.flows:
            mode = "with `deterministic`" if pipeline.deterministic else f"in mode {pipeline.mode}"
            why = f"has no effect {mode}, which evaluates between two steps: leave it out"
            yield Problem(("eval", name), why, uses=(("mode",), ("deterministic",)), at="key")


def _retries(pipeline: Pipeline) -> Iterator[Problem]:
    reward, choices = pipeline.reward, ("on_timeout", "on_error", "on_unscored")
    chosen = reward.retries != type(reward).model_fields["retries"].default
    if chosen and all(getattr(reward, name) != "retry" for name in choices):
        why = f"has no effect without `retry` for one of {', '.join(choices)}"
        yield Problem(("reward", "retries"), why, tuple(("reward", name) for name in choices), at="key")


def _reward(pipeline: Pipeline) -> Iterator[Problem]:
    reward, kind = pipeline.reward, scheme(pipeline.data.source)[0]
    route = ("reward", "fn")
    if reward.fn in BUILT_IN_REWARDS:
        if reward.options:
            yield Problem(("reward", "options"), f"{reward.fn} takes no options", uses=(route,), at="key")
        if reward.fn == "reasoning_gym" and kind != "reasoning_gym" and pipeline.data.source:
            why = f"reasoning_gym scores only its own tasks: data.source is {pipeline.data.source!r}"
            yield Problem(route, why, uses=(("data", "source"),))
        if reward.fn == "reasoning_gym" and scheme(pipeline.eval.source or "reasoning_gym")[0] != "reasoning_gym":
            why = f"reasoning_gym scores only its own tasks: eval.source is {pipeline.eval.source!r}"
            yield Problem(route, why, uses=(("eval", "source"),))
    elif reward.fn:
        yield from _function(route, reward.fn, BUILT_IN_REWARDS)


def _function(route: Route, path: str, built_in: tuple[str, ...] = ()) -> Iterator[Problem]:
    if ":" not in path and built_in:
        tail = hint(path, built_in, "built in are")
        yield Problem(route, f"expected `module:function`, `file.py:function` or a built-in, found {path!r}{tail}")
    elif fault := importing.fault(path):
        yield Problem(route, fault)


def _stages(pipeline: Pipeline) -> Iterator[Problem]:
    for number, stage in enumerate(pipeline.stages):
        if stage.fn:
            yield from _function(("stages", number, "fn"), stage.fn)


def _batch(pipeline: Pipeline) -> Iterator[Problem]:
    train = pipeline.train
    size, rows, prompts = train.group_size, train.rows_per_step, train.prompts_per_step
    route, sizes = ("train", "rows_per_step"), (("train", "group_size"), ("train", "prompts_per_step"))
    if rows is not None and rows % size:
        fitting = " or ".join(str(fit) for fit in (rows // size * size, (rows // size + 1) * size) if fit)
        yield Problem(route, f"{rows} is not a multiple of train.group_size {size}: use {fitting}", sizes)
    elif rows is not None and prompts is not None and prompts * size != rows:
        product = f"train.prompts_per_step {prompts} times train.group_size {size} = {prompts * size}"
        yield Problem(route, f"{rows} is not {product}: give one of the two", sizes)
    if size == 1 and train.advantage in BY_GROUP and not train.supervised:
        why = f"1 leaves {train.advantage} nothing to compare a response with, every advantage is zero: use 2 or more"
        yield Problem(("train", "group_size"), why, (("train", "algorithm"), ("train", "advantage")))
    yield from _budget(pipeline)


def _budget(pipeline: Pipeline) -> Iterator[Problem]:
    budget = pipeline.train.token_budget
    prompt, response = pipeline.data.max_prompt_tokens, pipeline.rollout.max_response_tokens
    if budget < prompt + response:
        longest = f"data.max_prompt_tokens {prompt} + rollout.max_response_tokens {response} = {prompt + response}"
        uses = (("data", "max_prompt_tokens"), ("rollout", "max_response_tokens"))
        yield Problem(("train", "token_budget"), f"{budget} is less than the longest row, {longest}", uses)


def _algorithm(pipeline: Pipeline) -> Iterator[Problem]:
    train = pipeline.train
    given = {name: getattr(train, name) for name in sorted(train.model_fields_set)}
    for line in unused(train.algorithm, given):
        name, _, why = line.partition(" ")
        yield Problem(("train", name), why, (("train", "algorithm"), ("train", "aggregate")), at="key")
    yield from _named(("train", "advantage"), train.advantage, ADVANTAGES)
    yield from _named(("train", "loss"), train.loss, LOSSES)
    yield from _filters(train)
    yield from _bounds(train)
    if train.dynamic_sampling and train.group_size == 1:
        why = "replaces every group of one response, since its rewards are all equal: leave it out"
        yield Problem(("train", "dynamic_sampling"), why, (("train", "group_size"),), at="key")
    if train.advantage == "none" and not train.supervised:
        if kl_in_reward(train.algorithm_options):
            why = "reward has no effect with advantage none, which reads no reward: use `kl_in: loss`"
            yield Problem(("train", "kl_in"), why, (("train", "advantage"), ("train", "kl_coef")))
        elif not (train.distill_coef or train.kl_coef or train.entropy_coef):
            why = "none trains nothing by itself: give distill_coef, kl_coef or entropy_coef, or another advantage"
            yield Problem(("train", "advantage"), why, (("train", "distill_coef"),))


def _filters(train: Train) -> Iterator[Problem]:
    for part, names in train.filters.items():
        coefficient, why = f"{part}_coef", ""
        if part != "policy" and not getattr(train, coefficient):
            why = f"has no effect while {coefficient} is 0"
        elif part == "kl" and train.kl_in == "reward":
            why = "has no effect with kl_in reward, which is no part of the loss"
        elif not names:
            why = "has no effect while it names no filter: leave it out"
        if why:
            yield Problem(("train", "filters", part), why, (("train", "kl_coef"), ("train", "kl_in")), at="key")


def _bounds(train: Train) -> Iterator[Problem]:
    """Check what a correction holds its ratio, or its metric, within."""
    route, low, high = ("train", "off_policy_low"), train.off_policy_low, train.off_policy_high
    signed = train.off_policy == "reject" and train.off_policy_metric == "k1"
    if signed and "off_policy_low" not in train.model_fields_set:
        why = f"k1 has either sign: give off_policy_low, for example {-high:g}"
        yield Problem(("train", "off_policy_metric"), why, (route,))
    elif low < 0 and not signed:
        yield Problem(route, f"{low:g}: only the metric k1 falls below 0", (("train", "off_policy_metric"),))
    elif low >= high:
        yield Problem(route, f"{low:g} is not below off_policy_high {high:g}", (("train", "off_policy_high"),))


def _supervised(pipeline: Pipeline) -> Iterator[Problem]:
    uses: tuple[Route, ...] = (("train", "algorithm"),)
    if not pipeline.train.supervised:
        if pipeline.train.answers is not None:
            yield Problem(("train", "answers"), "has no effect without `algorithm: sft`", uses, at="key")
        return
    if pipeline.warmup is not None:
        why = "is supervised training before another: give its steps to `train`, whose algorithm is sft"
        yield Problem(("warmup",), why, uses, at="key")
    if pipeline.stages:
        yield Problem(("stages",), "have no row to see with train.algorithm sft, which generates none", uses, at="key")
    if not pipeline.phased:
        why = f"{pipeline.mode} is for responses, and train.algorithm sft generates none: use `separated`"
        yield Problem(("mode",), why, uses)
    if pipeline.rollout.temperature != 1:
        why = "has no effect with train.algorithm sft, which trains at 1: evaluation has its own, eval.temperature"
        yield Problem(("rollout", "temperature"), why, uses, at="key")


def _teacher(pipeline: Pipeline) -> Iterator[Problem]:
    teacher, coef = pipeline.teacher, pipeline.train.distill_coef
    uses: tuple[Route, ...] = (("train", "distill_coef"), ("train", "algorithm"))
    if teacher is None:
        if coef:
            why = f"train.distill_coef {coef:g} needs a teacher: give `path`, a folder in Hugging Face format"
            yield Problem(("teacher",), why, uses, at="key")
        return
    if not coef:
        why = "has no effect while train.distill_coef is 0: use `algorithm: opd`, or give the coefficient"
        yield Problem(("teacher",), why, uses, at="key")
    yield from _beside(pipeline, ("teacher", "path"), teacher.path)


def _beside(pipeline: Pipeline, route: Route, path: str) -> Iterator[Problem]:
    """Check the folder of a model that reads what the policy wrote."""
    folder = Path(path)
    yield from _folder(route, path)
    if folder.is_dir() and path:
        theirs, ours = vocabulary.size(folder), vocabulary.own_size(pipeline.model)
        if not (folder / "config.json").is_file():
            yield Problem(route, f"{path} has no config.json: expected a folder in Hugging Face format")
        elif theirs is not None and ours is not None and theirs < ours:
            why = f"{path} knows {theirs} tokens, and the policy {ours}: expected the same vocabulary"
            yield Problem(route, why, (("model",),))


def _critic(pipeline: Pipeline) -> Iterator[Problem]:
    critic, train = pipeline.critic, pipeline.train
    if critic is None:
        return
    if train.advantage != "gae":
        why = f"is not used by advantage {train.advantage}, only by gae: leave it out, or use `algorithm: ppo`"
        yield Problem(("critic",), why, (("train", "advantage"), ("train", "algorithm")), at="key")
        return
    if critic.path is not None:
        yield from _beside(pipeline, ("critic", "path"), critic.path)
    if critic.warmup >= train.steps:
        why = f"{critic.warmup} leaves none of train.steps {train.steps} in which the policy learns: use fewer"
        yield Problem(("critic", "warmup"), why, (("train", "steps"),))


def _named(route: Route, name: str, known: Sequence[str]) -> Iterator[Problem]:
    if is_path(name):
        if fault := importing.fault(name):
            yield Problem(route, fault)
    elif name not in known:
        yield Problem(route, f"neither known nor `module:function` of your own: {name!r}{hint(name, known)}")


def _schedule(pipeline: Pipeline) -> Iterator[Problem]:
    train = pipeline.train
    if train.lr_warmup > train.steps:
        why = f"{train.lr_warmup} is more than train.steps {train.steps}: the learning rate never reaches train.lr"
        yield Problem(("train", "lr_warmup"), why, (("train", "steps"),))


def _staleness(pipeline: Pipeline) -> Iterator[Problem]:
    fields = Pipeline.model_fields
    names = ("max_staleness", "on_stale", "max_requeues", "run_ahead")
    chosen = [name for name in names if getattr(pipeline, name) not in (fields[name].default, 0)]
    if pipeline.mode != "async":
        for name in chosen:
            why = f"has no effect in mode {pipeline.mode}, which trains nothing that is stale: use `mode: async`"
            yield Problem((name,), why, (("mode",),), at="key")
        return
    if "max_requeues" in chosen and pipeline.on_stale != "requeue":
        yield Problem(("max_requeues",), "has no effect without `on_stale: requeue`", (("on_stale",),), at="key")
    if pipeline.deterministic:
        why = "cannot hold in mode async, where time decides which weights a response gets: use another mode"
        yield Problem(("deterministic",), why, (("mode",),), at="key")
    ahead, most = pipeline.run_ahead, pipeline.staleness + 1
    if ahead is not None and ahead > most:
        why = f"{ahead} steps are never ahead: max_staleness {pipeline.staleness} admits {most}; use at most that"
        yield Problem(("run_ahead",), why, (("max_staleness",), ("mode",)))


def _emulated(pipeline: Pipeline) -> Iterator[Problem]:
    kinds = {"rollout": pipeline.rollout.backend, "train": pipeline.train.backend}
    if "emulated" in kinds.values() and set(kinds.values()) != {"emulated"}:
        name = next(name for name, kind in kinds.items() if kind != "emulated")
        other = next(name for name in kinds if kinds[name] == "emulated")
        why = f"{kinds[name]!r} cannot work with what emulated engines make up: emulate both or neither"
        yield Problem((name, "backend"), why, ((other, "backend"),))
    if kinds["train"] == "emulated" and pipeline.train.data_parallel > 1:
        why = "the emulated engine is one process: leave it out, and give the engine lower costs"
        yield Problem(("train", "data_parallel"), why, (("train", "backend"),))


def _packing(pipeline: Pipeline) -> Iterator[Problem]:
    train, route = pipeline.train, ("train", "packing")
    if train.packing and train.backend == "emulated":
        why = "the emulated engine has no padding to leave out: its time is that of the real tokens"
        yield Problem(route, why, (("train", "backend"),), at="key")
    if "packing" in train.model_fields_set and train.options.get("packing", train.packing) != train.packing:
        why = f"{train.options['packing']} is not train.packing {train.packing}: give one of the two"
        yield Problem(("train", "options"), why, (route,))


def _weights(pipeline: Pipeline) -> Iterator[Problem]:
    weights, why = pipeline.weights, None
    if weights.kv == "recompute" and pipeline.phased:
        why = f"has no effect in mode {pipeline.mode}, in which nothing runs while weights change: leave it out"
    elif weights.kv == "recompute" and weights.apply != "interrupt":
        why = f"has no effect with weights.apply {weights.apply}, which interrupts no response: use `apply: interrupt`"
    if why:
        yield Problem(("weights", "kv"), why, (("mode",), ("weights", "apply")), at="key")


def _stall(pipeline: Pipeline) -> Iterator[Problem]:
    executor = pipeline.executor
    stall, wait = executor.stall_timeout, executor.wait_timeout
    if stall != type(executor).model_fields["stall_timeout"].default and stall >= wait:
        why = f"{stall:g} s is never reached: executor.wait_timeout ends the run after {wait:g} s; use less than that"
        yield Problem(("executor", "stall_timeout"), why, (("executor", "wait_timeout"),))


def _channel(pipeline: Pipeline) -> Iterator[Problem]:
    weights, route = pipeline.weights, ("weights", "channel")
    if weights.channel == "inproc":
        why = "inproc is for engines in the trainer's process, and each is a process of its own: use `shm` or `file`"
        yield Problem(route, why)
    if weights.delta and weights.channel == "collective":
        why = "has no effect with channel collective, which sends the same to all: use `shm`, `tcp` or `file`"
        yield Problem(("weights", "delta"), why, (route,), at="key")
    if weights.host != "127.0.0.1" and weights.channel not in ("tcp", "collective"):
        why = f"has no effect with channel {weights.channel}, which does not listen: use `tcp` or `collective`"
        yield Problem(("weights", "host"), why, (route,), at="key")
