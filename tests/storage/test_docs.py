from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "transfer-queue.md"


def test_the_page_on_the_queue_runs_as_it_stands(tmp_path, capsys):
    code = PAGE.read_text().split("```python\n")[1].split("```")[0]
    exec(compile(code.replace("/tmp/asyncflow.sock", str(tmp_path / "queue")), str(PAGE), "exec"), {})
    assert capsys.readouterr().out == "Counts(admitted=8, done=8, dropped={}, live=0) 0\n"


def test_the_page_on_units_runs_as_it_stands(tmp_path, capsys):
    page = PAGE.with_name("units.md")
    code = page.read_text().split("```python\n")[1].split("```")[0]
    exec(compile(code.replace("/tmp/queue", str(tmp_path / "queue")), str(page), "exec"), {})
    assert capsys.readouterr().out == "[3 2 3 2 3 2 3 2] 2\n"
