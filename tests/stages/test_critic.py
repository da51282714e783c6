"""The critic in the trainer's process: values of rows, a step of its own, and what a checkpoint has of it."""

import numpy as np
import pytest
import torch

from asyncflow import checkpoint
from asyncflow.config.model import Data, Model, Pipeline, Reward
from asyncflow.config.training import Critic as Settings
from asyncflow.config.training import Train as Training
from asyncflow.config.training import Warmup
from asyncflow.execute.messages import Save, Saved, Stepped
from asyncflow.stage import Context
from asyncflow.stages.critic import Critic
from asyncflow.stages.train import Train
from asyncflow.storage.batch import Column
from tests.backends.tiny import CONFIG, batch

REWARD = 2.0


def pipeline(budget=200, mode="separated", deterministic=False, whiten=True, warm_up=False, **critic):
    return Pipeline(
        model=Model(config={**CONFIG, "vocab_size": 60}, tokenizer="characters"),
        data=Data(source="python"),
        reward=Reward(fn="exact_match"),
        mode=mode,
        deterministic=deterministic,
        warmup=Warmup(steps=1) if warm_up else None,
        critic=Settings(**{"lr": 1e-2, **critic}),
        train=Training(
            algorithm="ppo", group_size=4, prompts_per_step=2, token_budget=budget, steps=9, lr=1e-2, whiten=whiten
        ),
    )


def rows(seed=0):
    """Two groups of four rows as the trainer gets them, but for `values` and what follows from them."""
    made = batch(8, seed)
    lengths = made["response_tokens"].lengths
    return made.with_columns({
        "response_mask": [np.ones(n, np.uint8) for n in lengths],
        "rollout_logprobs": [np.full(n, -4.0, np.float32) for n in lengths],
        "versions": [np.zeros(n, np.int32) for n in lengths],
        "group_id": np.repeat([0, 1], 4), "row": np.arange(8), "requeued": np.zeros(8, np.int32),
        "reward": np.full(8, REWARD), "reward_outcome": ["ok"] * 8,
    })  # fmt: skip


class Process:
    """The two stages as the trainer's process has them."""

    def __init__(self, folder, resume=None, **options):
        self.told = []
        context = Context(pipeline(**options), "trainer-0", folder, self.told.append, resume)
        self.critic, self.train = Critic(), Train()
        self.critic.setup(context)
        self.train.setup(context)
        self.train._compared = True  # the rows' log-probabilities are made up

    def values(self, batch):
        return self.critic.process(batch)["values"]

    def step(self, batch, parts=1):
        """Train on rows whose return is the reward at every token; return the metrics."""
        version = self.train.trainer.engine.version
        values = self.values(batch)
        returns = np.full(len(values.values), REWARD, np.float32)
        made = batch.with_columns({
            "versions": [np.full(n, version, np.int32) for n in batch["response_tokens"].lengths],
            "values": values,
            "returns": Column.ragged(returns, values.offsets, "list<float32>"),
            "advantage": Column.ragged(returns - values.values, values.offsets, "list<float32>"),
        })  # fmt: skip
        for part in np.split(np.arange(8), parts):
            list(self.train.process(made.take(part)))
        return self.said()

    def said(self):
        """Metrics of the last step."""
        return [event.metrics for event in self.told if isinstance(event, Stepped)][-1]

    def weights(self, critic=False):
        engine = self.train._valuer.engine if critic else self.train.trainer.engine
        return dict(engine.export_weights())

    def save(self, folder):
        self.train.command(Save(str(folder), {"seed": 0}))
        self.train._writing.submit(lambda: None).result()
        assert any(isinstance(event, Saved) for event in self.told)

    def close(self):
        self.critic.close()
        self.train.close()


@pytest.fixture
def process(tmp_path):
    made = []

    def start(**options):
        made.append(Process(tmp_path, **options))
        return made[-1]

    yield start
    for each in made:
        each.close()


def same(first, second):
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def test_the_critic_learns_what_rows_are_worth_and_says_so(process):
    own = process(clip=None)
    steps = [own.step(rows(seed)) for seed in range(9)]
    assert steps[0]["value_loss"] == pytest.approx(REWARD**2 / 2)
    assert steps[-1]["value_loss"] < steps[0]["value_loss"] / 5
    assert abs(own.values(rows(9)).values.mean() - REWARD) < 0.6
    assert all(step["critic_grad_norm"] > 0 and step["value_clip_share"] == 0 for step in steps)
    assert own.train.trainer.engine.version == 9, "versions are the policy's"


def test_values_are_those_of_the_critic_before_the_step(process):
    own = process()
    first = own.values(rows())
    assert not first.values.any()
    own.step(rows())
    assert own.values(rows()).values.all()


@pytest.mark.parametrize("whiten", [True, False])
def test_how_rows_come_and_are_cut_changes_nothing(process, whiten):
    ways = [{"budget": 200}, {"budget": 20}]
    own = [process(whiten=whiten, **way) for way in ways]
    for seed in range(2):
        one, other = own[0].step(rows(seed)), own[1].step(rows(seed), parts=2)
        for name in ("value_loss", "value_clip_share", "explained_variance", "critic_grad_norm"):
            assert other[name] == pytest.approx(one[name], rel=1e-4, abs=1e-6), name
    first, second = (each.weights(critic=True) for each in own)
    for name, tensor in first.items():
        torch.testing.assert_close(second[name], tensor, rtol=1e-3, atol=1e-5)


def test_explained_variance_is_the_share_that_the_values_had_foreseen(process):
    own = process()
    made = rows()
    lengths = made["response_tokens"].lengths
    returns = np.random.default_rng(0).standard_normal(lengths.sum()).astype(np.float32)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    columns = {"returns": returns, "values": returns / 2, "advantage": returns}
    list(
        own.train.process(
            made.with_columns({n: Column.ragged(v, offsets, "list<float32>") for n, v in columns.items()})
        )
    )
    assert own.said()["explained_variance"] == pytest.approx(0.75)


def test_while_the_critic_warms_up_the_policy_stays(process):
    own = process(warmup=2)
    before = own.weights()
    rates = []
    for seed in range(3):
        rates.append(own.step(rows(seed))["lr"])
        assert same(own.weights(), before) == (seed < 2)
    assert rates == [0.0, 0.0, 1e-2]
    assert own.train.trainer.engine.version == 3


def test_in_deterministic_mode_nothing_lies_beside_a_row(process):
    own, loose = process(deterministic=True), process()
    for each in (own, loose):
        each.step(rows())
    found = own.values(rows())
    for row in range(8):
        assert own.values(rows().take([row])).values.tolist() == found[row].tolist()
    np.testing.assert_allclose(loose.values(rows()).values, found.values, atol=1e-5)


@pytest.mark.parametrize("mode", ["colocated", "streaming"])
def test_a_saved_critic_goes_on_bit_for_bit(process, tmp_path, mode):
    own = process(mode=mode, deterministic=True)
    for seed in range(2):
        own.step(rows(seed))
    own.save(tmp_path / "checkpoint")
    own.step(rows(2))
    again = process(mode=mode, deterministic=True, resume=tmp_path / "checkpoint")
    again.step(rows(2))
    assert same(again.weights(), own.weights())
    assert same(again.weights(critic=True), own.weights(critic=True))
    assert again.said() == own.said()


def test_before_a_warm_up_has_ended_there_is_no_critic_to_save(process, tmp_path):
    own = process(warm_up=True)
    own.save(tmp_path / "checkpoint")
    assert not (tmp_path / "checkpoint" / checkpoint.CRITIC).exists()


@pytest.mark.parametrize("resumed", [False, True])
def test_after_a_warm_up_it_begins_as_the_model_that_training_begins_with(process, tmp_path, resumed):
    first, early = process(), process(warm_up=True)
    first.step(rows())
    first.save(tmp_path / "reference")
    body = {
        f"body.{name.removeprefix('model.')}": own for name, own in first.weights().items() if "lm_head" not in name
    }
    own = process(warm_up=True) if resumed else early
    own.values(rows())
    found = {name: tensor for name, tensor in own.weights(critic=True).items() if name.startswith("body.")}
    assert same(found, body)


def test_a_folder_of_its_own_comes_before_any_other(process, tmp_path):
    first = process()
    first.step(rows())
    first.save(tmp_path / "own")
    own = process(path=str(tmp_path / "own" / checkpoint.CRITIC))
    own.values(rows())
    assert same(own.weights(critic=True), first.weights(critic=True))


def test_what_is_wrong_with_it_shows_before_anything_is_generated(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "qwen2"}')
    with pytest.raises(OSError, match=r"model\.safetensors"):
        Process(tmp_path, path=str(tmp_path))


def test_a_run_that_is_stopped_answers_no_row(tmp_path):
    own = Process(tmp_path)
    own.critic._context.stopping.set()
    assert own.critic.process(rows()) is None
    own.close()
