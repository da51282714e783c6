"""On-policy distillation: the policy comes nearer to a teacher that another run has trained."""

import pytest

from asyncflow import Flow
from asyncflow.errors import ConfigError
from tests.system.test_failures import kill, steps
from tests.system.test_run import timeless

pytestmark = pytest.mark.timeout(1200)  # processes start slowly where cores are shared


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Where the teacher is, trained once."""
    return tmp_path_factory.mktemp("teacher")


@pytest.fixture
def teacher(pipeline, folders):
    """A run's checkpoint: a model that was shown the words."""
    folder = folders / "run"
    if not folder.exists():
        path = pipeline(warmup={"steps": 20, "rows_per_step": 12, "lr": 5e-3}, train={"steps": 1}, eval={"rows": 0})
        Flow.from_yaml(path, f"output.folder={folder}").start().wait(600)
    return folder / "checkpoint"


def distilling(teacher, **changes):
    train = {"algorithm": "opd", "group_size": 1, "prompts_per_step": 64, "steps": 12, "lr": 3e-2, **changes}
    return {"warmup": None, "eval": {"rows": 0}, "train": train, "teacher": {"path": str(teacher)}}


def distances(folder):
    return [record["teacher_kl"] for record in timeless(folder) if record["kind"] == "step"]


def test_the_policy_comes_nearer_to_the_teacher_though_its_process_is_killed(pipeline, teacher):
    flow = Flow.from_yaml(pipeline(**distilling(teacher))).start()
    steps(flow, 2)
    kill(flow, "teacher-0")
    summary = flow.wait(600)
    found = distances(summary.folder)
    assert len(found) == 12
    assert sum(found[-3:]) / 3 < 0.6 * found[0]
    assert summary["restarts"] == {"teacher-0": 1}


def test_a_teacher_may_come_beside_the_advantage_of_a_group_where_stages_overlap(pipeline, teacher):
    changes = distilling(teacher, algorithm="grpo", distill_coef=0.5, group_size=4, prompts_per_step=4, steps=3)
    summary = Flow.from_yaml(pipeline(**changes, mode="async")).start().wait(600)
    assert len(distances(summary.folder)) == 3
    assert summary["ledger"]["dropped"] == {}


def test_a_teacher_of_another_vocabulary_ends_the_run_before_anything_is_generated(pipeline, teacher):
    changes = distilling(teacher)
    flow = Flow.from_yaml(pipeline(**changes, model={"characters": "zyxwvutsrqponmlkjihgfedcba:"}))
    with pytest.raises(ConfigError, match="has another vocabulary than the policy: token 3 is 'z' for the policy"):
        flow.start().wait(600)
    assert not flow.records
