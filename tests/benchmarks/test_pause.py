import json

from benchmarks import pause


def test_the_pause_of_an_update_is_told_in_steps(tmp_path, capsys):
    options = ["--updates", "2", "--width", "16", "--rows", "2", "--output", str(tmp_path)]
    found = json.loads(pause.main(options).read_text())
    for kind in ("keep", "recompute"):
        one = found["interrupt"][kind]
        assert one["step"]["median"] > 0
        assert one["pause / step"]["min"] >= 0
        assert one["tokens before"]["min"] > pause.PROMPT
    assert "keep: the pause is" in capsys.readouterr().out
