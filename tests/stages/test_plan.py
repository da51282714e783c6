"""What the trainer waits for: whatever may drop a row has had it before it is trained."""

import pytest

from asyncflow.config.model import Data, Eval, Model, Output, Pipeline, Reward, Rollout
from asyncflow.config.model import Stage as StageConfig
from asyncflow.config.training import Train
from asyncflow.errors import ConfigError
from asyncflow.pipeline import StageSpec, Take
from asyncflow.stages.plan import plan

SHAPED = StageConfig(fn="own.py:shaped", reads=("reward",), writes={"shaped": "float64"})
BESIDE = StageConfig(fn="own.py:beside", reads=("reward",), writes={"long": "list<int64>", "short": "int8"})
AFTER_BESIDE = StageConfig(fn="own.py:after_beside", reads=("long",), writes={"end": "string"})
SINK = StageConfig(fn="own.py:sink", reads=("reward",), writes={})
LATE = StageConfig(fn="own.py:late", reads=("trained_by",), writes={"lag": "int64"})
LATER = StageConfig(fn="own.py:later", reads=("lag",), writes={"more": "int64"})


def stages(*own: StageConfig, mode: str = "streaming", on_stale: str = "mask", **train: object) -> dict[str, StageSpec]:
    config = Pipeline(
        model=Model(path="."),
        data=Data(source="python"),
        reward=Reward(fn="exact_match"),
        stages=own,
        mode=mode,
        on_stale=on_stale,
        train=Train(**train),
        output=Output(samples_every=1),
    )
    return {stage.name: stage for stage in plan(config).tables["train"].stages}


@pytest.mark.parametrize("mode", ["colocated", "separated", "streaming", "async"])
def test_the_trainer_waits_for_stages_beside_it_by_one_column_each(mode):
    plain = stages(mode=mode)["train"].reads
    found = stages(BESIDE, SINK, mode=mode)
    assert found["train"].reads == (*plain, "short")
    assert {name for name, stage in found.items() if not stage.drops} == {"sink", "samples"}


def test_what_it_waits_for_anyway_is_not_fetched_again():
    assert stages(BESIDE, AFTER_BESIDE)["train"].reads == (*stages()["train"].reads, "end")
    assert stages(SHAPED, reward="shaped")["train"].reads == stages()["train"].reads


@pytest.mark.parametrize(
    ("train", "name", "column", "readers"),
    [
        ({"kl_coef": 0.1}, "reference", "ref_logprobs", {"train"}),
        ({"kl_coef": 0.1, "kl_in": "reward"}, "reference", "ref_logprobs", {"advantage", "train"}),
        ({"algorithm": "opd"}, "teacher", "teacher_logprobs", {"advantage", "train"}),
        ({"distill_coef": 0.5}, "teacher", "teacher_logprobs", {"advantage", "train"}),
    ],
)
def test_models_that_are_not_trained_stand_in_a_process_of_their_own_where_they_are_needed(
    train, name, column, readers
):
    found = stages(**train)
    assert not {"reference", "teacher"} & (found.keys() - {name})
    assert (found[name].host, found[name].writes) == (name, {column: "list<float32>"})
    assert {stage.name for stage in found.values() if column in stage.reads} == readers
    assert not {"reference", "teacher"} & stages().keys()


def test_supervised_training_has_no_stage_but_the_trainer():
    found = stages(mode="separated", algorithm="sft", prompts_per_step=6)
    assert found.keys() == {"source", "train"}
    assert set(found["train"].reads) == set(found["source"].writes)
    assert found["train"].take == Take(rows=6)


@pytest.mark.parametrize("on_stale", ["mask", "drop", "requeue", "wait"])
def test_groups_are_trained_in_the_order_of_their_admission_where_none_may_be_too_old(on_stale):
    assert stages(mode="async", on_stale=on_stale)["train"].take.ordered == (on_stale == "wait")


def test_nothing_waits_for_a_stage_that_comes_after_the_trainer_and_it_drops_nothing():
    found = stages(LATE, LATER)
    assert found["train"].reads == stages()["train"].reads
    assert {name for name, stage in found.items() if not stage.drops} == {"late", "later", "samples"}


@pytest.mark.parametrize(
    ("room", "samples", "take", "lanes"),
    [(8, 1, Take(groups=1), 8), (8, 3, Take(groups=1), 3), (256, 2, Take(groups=2, partial=True), 64)],
)
def test_held_out_prompts_alone_fill_an_engine_and_ask_for_no_room(room, samples, take, lanes):
    config = Pipeline(
        model=Model(path="."),
        data=Data(source="python"),
        reward=Reward(fn="exact_match"),
        rollout=Rollout(max_inflight=room),
        eval=Eval(rows=4, samples=samples, temperature=1.0),
        mode="async",
    )
    phases = config.model_copy(update={"mode": "separated"})
    found, phased = ({stage.name: stage for stage in plan(one).tables["eval"].stages} for one in (config, phases))
    assert (found["rollout"].take, found["rollout"].lanes, found["rollout"].paced) == (take, lanes, False)
    assert not found["evaluate"].drops
    assert (phased["rollout"].take, phased["rollout"].lanes) == (Take(whole=True), 1)


@pytest.mark.parametrize("mode", ["colocated", "separated", "streaming", "async"])
def test_a_critic_stands_between_rollout_and_advantage_where_that_is_gae(mode):
    found = stages(mode=mode, algorithm="ppo", data_parallel=2, prompts_per_step=5)
    critic, trainer = found["critic"], found["train"]
    assert "critic" not in stages(mode=mode)
    assert set(critic.reads) <= {"prompt_tokens", "response_tokens", "response_mask"}, "it waits for no reward"
    assert "values" in found["advantage"].reads
    assert {"values", "returns"} <= set(trainer.reads)
    assert (critic.host, critic.replicas, critic.ranks) == ("trainer", 2, 1)
    assert critic.take.groups == (3 if mode in ("colocated", "separated") else None), "each rank has a share of a phase"


@pytest.mark.parametrize(
    ("rollout", "train", "message"),
    [
        ({"bogus": 1}, {}, "option 'bogus' does not exist"),
        ({"decode": -1}, {}, "option decode is a number of at least 0"),
        ({"lengths": {"kind": "weird"}}, {}, "a kind of fixed, uniform, lognormal"),
        ({"lengths": {"mean": "long"}}, {}, "mean of lengths are numbers"),
        ({}, {"weights": -5}, "option weights is a number of at least 0"),
    ],
)
def test_costs_of_emulated_engines_are_refused_before_anything_starts(rollout, train, message):
    config = Pipeline(
        model=Model(path="."),
        data=Data(source="python"),
        reward=Reward(fn="exact_match"),
        rollout=Rollout(backend="emulated", options=rollout),
        train=Train(backend="emulated", options=train),
    )
    with pytest.raises(ConfigError, match=message):
        plan(config)
