import json
from pathlib import Path

from benchmarks import publish, report


def test_every_channel_is_measured(tmp_path, capsys):
    found = json.loads(publish.main(["--rounds", "2", "--width", "16", "--output", str(tmp_path)]).read_text())
    assert found["bytes"] > 1e5
    names = {f"{change}: {name}" for change in publish.CHANGES for name in publish.SUBJECTS}
    assert found["seconds"].keys() == {*names, "memcpy"}
    for name in names:
        assert all(found["seconds"][name][part]["min"] > 0 for part in ("held", "published", "staged"))
    assert "shm, delta" in capsys.readouterr().out


def test_the_page_shows_the_committed_result():
    page = Path(__file__).parents[2] / "docs" / "weights.md"
    assert publish.table(json.loads((report.RESULTS / "publish.json").read_text())) in page.read_text()
