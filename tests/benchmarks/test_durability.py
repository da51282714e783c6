import json

from benchmarks import durability


def test_every_level_is_compared_in_the_same_round(tmp_path, capsys):
    arguments = ["--rounds", "1", "--quick", "--folder", str(tmp_path), "--output", str(tmp_path / "results")]
    assert durability.main(arguments) == 0
    found = json.loads((tmp_path / "results" / "durability.json").read_text())
    assert len(found["cases"]) == 6
    for case in found["cases"].values():
        assert set(case["ratio to memory"]) == {"memory", "journal", "fsync"}
        assert case["ratio to memory"]["memory"]["median"] == 1
    assert "memory 1, journal " in capsys.readouterr().out
