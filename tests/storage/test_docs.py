import shlex
import subprocess
import sys
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "transfer-queue.md"
HOSTS = PAGE.with_name("storage-security.md")


def test_the_page_on_the_queue_runs_as_it_stands(tmp_path, capsys):
    code = PAGE.read_text().split("```python\n")[1].split("```")[0]
    exec(compile(code.replace("/tmp/asyncflow.sock", str(tmp_path / "queue")), str(PAGE), "exec"), {})
    assert capsys.readouterr().out == "Counts(admitted=8, done=8, dropped={}, live=0) 0\n"


def test_the_page_on_units_runs_as_it_stands(tmp_path, capsys):
    page = PAGE.with_name("units.md")
    code = page.read_text().split("```python\n")[1].split("```")[0]
    exec(compile(code.replace("/tmp/queue", str(tmp_path / "queue")), str(page), "exec"), {})
    assert capsys.readouterr().out == "[3 2 3 2 3 2 3 2] 2\n"


def test_the_page_on_other_hosts_runs_as_it_stands(tmp_path, monkeypatch, capsys):
    page = HOSTS.read_text()
    shell, code = (page.split(f"```{kind}\n")[1].split("```")[0] for kind in ("sh", "python"))
    monkeypatch.setenv("PYTHONPATH", str(HOSTS.parents[1]))
    monkeypatch.chdir(tmp_path)
    keys, start = ([sys.executable, "-m", *shlex.split(line.replace(":5555", ":*"))] for line in shell.splitlines())
    subprocess.run(keys, check=True, timeout=100)
    with subprocess.Popen(start, stdout=subprocess.PIPE, text=True) as process:
        try:
            exec(compile(code, str(HOSTS), "exec"), {"url": process.stdout.readline().strip()})
        finally:
            process.terminate()
    assert capsys.readouterr().out.splitlines()[-1] == "[0 1 2]"
