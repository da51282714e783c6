import json

import pytest

from benchmarks import queue
from benchmarks.rows import Case, nbytes


def test_a_case_is_the_same_each_time_and_as_large_as_it_says():
    case = Case("a", "tokens", 256)
    rows, again = case.rows(), case.rows()
    assert all((rows[name][0] == again[name][0]).all() for name in rows)
    assert 5e6 < nbytes(rows) < 10e6
    assert nbytes(Case("c", "blobs", 2).rows()) == 2 * (1 << 20) + 24


@pytest.mark.timeout(300)
def test_the_benchmark_runs_and_writes_what_it_found(tmp_path, capsys):
    path = queue.main(["--quick", "--rounds", "1", "--output", str(tmp_path)])
    found = json.loads(path.read_text())
    who = {name for rows in found["figures"].values() for name in rows}
    assert {"memcpy copy", "pyzmq transfer", "embedded put", "ipc stream", "ipc delivered", "ipc put of 2"} <= who
    assert all(figure["min"] > 0 for rows in found["figures"].values() for figure in rows.values())
    assert len(found["figures"]) == 6
    assert path.with_suffix(".png").stat().st_size > 1000
    assert "embedded put" in capsys.readouterr().out
