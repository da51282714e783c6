import json

import pytest

from asyncflow.config.load import load
from benchmarks import corrections, learning, recipes
from benchmarks.learning import STUDY
from benchmarks.quickstart import EXAMPLE

TINY = ["warmup=null", "train.steps=2", "train.prompts_per_step=2", "eval.rows=2", "data.size=20"]


@pytest.mark.timeout(600)
def test_runs_are_added_to_what_was_measured_before(tmp_path):
    before = {"cores": 2, "cpu": "x", "python": "3", "commit": "c"}
    run = {"accuracy": {"after_warmup": 0.1, "after": 0.9}, "reward": [0.1, 0.2], "staleness_mean": 0.0,
           "staleness_max": 0.0, "ledger": {}, "rows_per_s": 10.0, "seconds": 1.0, "commit": "c"}  # fmt: skip
    (tmp_path / "learning.json").write_text(json.dumps({**before, "runs": {"colocated": {"0": run, "1": run}}}))
    chosen = ["--seeds", "0", "--case", "async, 1", "--set", *TINY]
    found = json.loads(STUDY.main([*chosen, "--output", str(tmp_path)]).read_text())
    assert found["runs"]["colocated"] == {"0": run, "1": run}
    made = found["runs"]["async, 1"]["0"]
    assert len(made["reward"]) == 2
    assert made["staleness_max"] <= 1
    assert (tmp_path / "learning.png").stat().st_size > 1000
    made["accuracy"]["after_warmup"] = 0.0
    assert "| colocated | 2 | 10% (10–10) | 90% (90–90) | 0 (0–0) | 0 |" in STUDY.page(found)


@pytest.mark.parametrize("study", [learning.STUDY, recipes.STUDY, corrections.STUDY], ids=lambda study: study.name)
def test_every_case_is_a_valid_pipeline_of_its_own(study):
    found = [load([EXAMPLE], overrides).pipeline for overrides in study.cases.values()]
    assert all(one != other for number, one in enumerate(found) for other in found[:number])
