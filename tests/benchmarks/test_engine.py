import json

import pytest

from benchmarks import engine


@pytest.mark.timeout(600)
def test_a_pipeline_of_emulated_engines_is_measured_against_its_slowest_stage(tmp_path):
    chosen = ["--steps", "3", "--seconds", "0.5", "--case", "trainer is slowest", "--mode", "async"]
    path = engine.main([*chosen, "--output", str(tmp_path)])
    found = json.loads(path.read_text())["share of the ideal"]
    assert list(found) == ["trainer is slowest"]
    assert 0 < found["trainer is slowest"]["async"] < 1.1
