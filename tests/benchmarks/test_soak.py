import json

import pytest

from benchmarks import soak


@pytest.mark.parametrize(
    ("name", "values", "good"),
    [
        ("descriptors", [5, 40, 40, 41, 40, 42], True),
        ("descriptors", [5, 40, 40, 45, 50, 60], False),
        ("rss", [100 << 20, *[300 << 20] * 6, 310 << 20], True),
        ("rss", [each << 20 for each in range(300, 500, 10)], False),
        ("shm", [0], True),
    ],
)
def test_what_keeps_growing_is_told_from_what_warms_up(name, values, good):
    assert soak.flat(name, values) == good


def test_rows_stream_and_are_watched(tmp_path, capsys):
    soak.main(["--seconds", "2", "--every", "0.2", "--output", str(tmp_path)])
    found = json.loads((tmp_path / "soak.json").read_text())
    assert found["rows"] > 0
    assert set(found["flat"]) == {"rss", "shm", "descriptors"}
    assert len(found["samples"]["rss"]) == len(found["samples"]["seconds"]) > 1
    assert "rows in 2 s" in capsys.readouterr().out
