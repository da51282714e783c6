"""Runs with a critic: in phases and beside generation, on several ranks, and through an interruption."""

import pytest

from asyncflow import Flow
from asyncflow.checkpoint import CRITIC
from tests.system.test_resume import until
from tests.system.test_run import timeless

pytestmark = pytest.mark.timeout(1200)  # processes start slowly where cores are shared

PPO = {
    "warmup": {"steps": 1},
    "eval": {"rows": 0},
    "train": {"algorithm": "ppo", "steps": 3, "kl_coef": 0.1},
    "critic": {"lr": 1e-2},
    "output": {"samples_every": 0},
}


def steps(folder):
    return [record for record in timeless(folder) if record["kind"] == "step"]


@pytest.mark.parametrize("mode", ["colocated", "async"])
def test_a_critic_is_trained_beside_the_policy(pipeline, mode):
    flow = Flow.from_yaml(pipeline(**PPO, mode=mode)).start()
    assert flow.wait(600)["complete"]
    found = steps(flow.folder)
    assert [step["step"] for step in found] == [1, 2, 3]
    assert all(step["critic_grad_norm"] > 0 and step["grad_norm"] > 0 for step in found)
    assert found[0]["explained_variance"] == 0, "values begin at zero"
    assert found[-1]["explained_variance"] != 0
    assert all(0 <= step["value_clip_share"] <= 1 for step in found)
    assert (flow.folder / "checkpoint" / CRITIC / "config.json").exists()


def test_emulated_engines_have_a_critic_too(pipeline):
    path = pipeline(**{**PPO, "train": {"algorithm": "ppo", "steps": 2, "backend": "emulated"}},
                    rollout={"backend": "emulated"}, reward={"fn": "exact_match"}, mode="streaming")  # fmt: skip
    flow = Flow.from_yaml(path).start()
    assert flow.wait(600)["complete"]
    assert [step["value_loss"] for step in steps(flow.folder)] == [0, 0]


def test_two_ranks_train_the_critic_as_one_does(pipeline):
    path = pipeline(**PPO, mode="separated")
    one, two = (
        steps(Flow.from_yaml(path, f"train.data_parallel={ranks}").start().wait(600).folder) for ranks in (1, 2)
    )
    for mine, theirs in zip(one, two, strict=True):
        for name in ("value_loss", "value_clip_share", "explained_variance", "critic_grad_norm", "loss", "grad_norm"):
            assert theirs[name] == pytest.approx(mine[name], rel=1e-3, abs=1e-5), name


def test_modes_and_an_interruption_change_no_number(pipeline, tmp_path):
    path = pipeline(**{**PPO, "train": {**PPO["train"], "steps": 5}}, deterministic=True)
    whole = steps(Flow.from_yaml(path).start().wait(600).folder)
    flow = Flow.from_yaml(path, "mode=streaming", f"output.folder={tmp_path / 'streaming'}").start()
    until(lambda: len(flow.metrics.of("step")) >= 2 or flow.phase == "ended")
    flow.stop()
    assert not flow.wait(300)["complete"]
    assert Flow.resume(flow.folder).start().wait(600)["complete"]
    assert steps(flow.folder) == whole
