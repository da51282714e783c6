"""What goes together: checks over the fields of a pipeline, each problem with the path of the field to mend.

Nothing is imported or read here but names and sizes: files and modules are looked for, the user's code does not run.
"""

import importlib.util
from collections.abc import Iterator
from pathlib import Path

from asyncflow.config import importing
from asyncflow.config.check_training import check_training
from asyncflow.config.document import Route
from asyncflow.config.model import Pipeline
from asyncflow.config.names import hint, nearest
from asyncflow.config.problem import Problem, model_folder
from asyncflow.config.sources import FILE_SCHEMES, GENERATED_SCHEMES, SCHEMES, scheme
from asyncflow.data.template import Template
from asyncflow.errors import ConfigError

BUILT_IN_REWARDS = ("exact_match", "char_match", "reasoning_gym")


def check(pipeline: Pipeline) -> list[Problem]:
    """Return every mistake that shows only when fields are seen together."""
    model = (_model, _data, _stop, _eval, _reward, _retries, _stages)
    running = (_staleness, _emulated, _weights, _channel, _stall)
    return [problem for part in (*model, check_training, *running) for problem in part(pipeline)]


def _model(pipeline: Pipeline) -> Iterator[Problem]:
    model = pipeline.model
    if model.path is None and model.config is None:
        yield Problem(("model",), "give `path` (a folder) or `config` (a new model)", at="key")
    elif model.path is not None and model.config is not None:
        yield Problem(("model", "config"), "`path` and `config` are both given: give one", at="key")
    if model.path is not None:
        yield from model_folder(("model", "path"), model.path)
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
        yield from model_folder(("model", "tokenizer"), model.tokenizer, "characters" if near else None)


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
