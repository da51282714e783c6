import json

from benchmarks import publish


def test_the_trainer_is_held_up_for_less_than_a_version_takes(tmp_path, capsys):
    found = json.loads(publish.main(["--rounds", "2", "--width", "16", "--output", str(tmp_path)]).read_text())
    assert found["bytes"] > 1e6
    assert 0 < found["seconds"]["held"]["median"] < found["seconds"]["published"]["median"]
    assert "held" in capsys.readouterr().out
