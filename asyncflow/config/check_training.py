"""What goes together in how the policy is trained: batch, recipe, losses, and the models beside it."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from asyncflow.algorithms.options import ADVANTAGES, BY_GROUP, LOSSES, is_path, kl_in_reward, unused
from asyncflow.config import importing, vocabulary
from asyncflow.config.document import Route
from asyncflow.config.model import Pipeline
from asyncflow.config.names import hint
from asyncflow.config.problem import Problem, model_folder
from asyncflow.config.training import Train


def check_training(pipeline: Pipeline) -> Iterator[Problem]:
    """Yield every mistake in what belongs to training."""
    for part in (_batch, _algorithm, _supervised, _teacher, _critic, _schedule, _packing):
        yield from part(pipeline)


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


def _beside(pipeline: Pipeline, route: Route, path: str) -> Iterator[Problem]:
    """Check the folder of a model that reads what the policy wrote."""
    folder = Path(path)
    yield from model_folder(route, path)
    if folder.is_dir() and path:
        theirs, ours = vocabulary.size(folder), vocabulary.own_size(pipeline.model)
        if not (folder / "config.json").is_file():
            yield Problem(route, f"{path} has no config.json: expected a folder in Hugging Face format")
        elif theirs is not None and ours is not None and theirs < ours:
            why = f"{path} knows {theirs} tokens, and the policy {ours}: expected the same vocabulary"
            yield Problem(route, why, (("model",),))


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


def _packing(pipeline: Pipeline) -> Iterator[Problem]:
    train, route = pipeline.train, ("train", "packing")
    if train.packing and train.backend == "emulated":
        why = "the emulated engine has no padding to leave out: its time is that of the real tokens"
        yield Problem(route, why, (("train", "backend"),), at="key")
    if "packing" in train.model_fields_set and train.options.get("packing", train.packing) != train.packing:
        why = f"{train.options['packing']} is not train.packing {train.packing}: give one of the two"
        yield Problem(("train", "options"), why, (route,))
