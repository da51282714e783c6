import json

import pytest

from benchmarks import bulk


@pytest.mark.timeout(300)
def test_the_benchmark_runs_and_writes_what_it_found(tmp_path, capsys):
    path = bulk.main(["--quick", "--rounds", "1", "--output", str(tmp_path)])
    found = json.loads(path.read_text())
    assert set(found["GB/s"]) == {"20 MiB uint8, put", "20 MiB uint8, get"}
    assert all(set(rates) == {"recv_into", "bulk", "frames"} for rates in found["of recv_into"].values())
    assert "of recv_into" in capsys.readouterr().out
