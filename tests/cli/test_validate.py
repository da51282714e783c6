import subprocess
import sys

import pytest

from asyncflow.cli.validate import split, validate

GOOD = """
model: {config: {model_type: qwen2, hidden_size: 32}, tokenizer: characters}
data: {source: "jsonl:data.jsonl"}
reward: {fn: exact_match}
rollout: {max_response_tokens: 8}
train: {steps: 5}
"""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data.jsonl").write_text('{"prompt": "a", "answer": "b"}\n')
    (tmp_path / "leaves.py").write_text("import sys\nsys.exit(3)\ndef f(batch):\n    return {}\n")
    odd = "from asyncflow.stage import stage\n@stage(reads='abc', writes={})\ndef f(batch):\n    return {}\n"
    (tmp_path / "odd.py").write_text(odd)
    (tmp_path / "mine.py").write_text("def twice(batch):\n    return {}\n")
    return tmp_path


def report(folder, capsys, text: str, *overrides: str) -> tuple[int, str]:
    (folder / "p.yaml").write_text(text)
    code = validate(["p.yaml", *overrides])
    captured = capsys.readouterr()
    return code, captured.out + captured.err


def test_a_good_file_shows_its_graph(folder, capsys):
    code, output = report(folder, capsys, GOOD)
    assert code == 0
    assert "reward [thread]: prompt_text, response_text, answer_text, item → reward" in output
    assert "valid: 5 steps of 32 prompts × 8 responses" in output


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("train: {stepz: 5}", "p.yaml:6:9: train.stepz: unknown key - did you mean 'steps'?"),
        ("train: {steps: many}", "p.yaml:6:16: train.steps"),
        ("train: {rows_per_step: 250, group_size: 8}", "use 248 or 256"),
        ("train: {algorithm: dr_grpo, std: biased}", "train.std: is not used by advantage dr_grpo, only by grpo"),
        ("train: {num_generations: 4}", "`train.group_size`"),
        (
            "stages: [{fn: mine.py:twice, reads: [nothing], writes: {x: float64}}]",
            "reads column nothing, which no stage",
        ),
        (
            "stages: [{fn: mine.py:twice, reads: [reward], writes: {reward: float64}}]",
            "has two writers: reward and twice",
        ),
        (
            "stages: [{fn: mine.py:twice, reads: [reward], writes: {x: string}}]\ntrain: {reward: x}",
            "train.reward: column x is string, not one number",
        ),
        ("stages: [{fn: mine.py:twice, reads: [advantage], writes: {x: float64}}]\ntrain: {reward: x}", "cycle"),
        ("stages: [{fn: mine.py:twice, reads: [reward], writes: {row: float64}}]", "writes the identity column row"),
        (
            "train: {steps: 5}\n\nwarmup: {steps: 1, answers: ['{x!r}']}",
            "p.yaml:8:30: warmup.answers[0]",
        ),
        ("stages: [{fn: leaves.py:f}]", "leaves.py: importing it failed: SystemExit"),
        ("stages: [{fn: odd.py:f}]", "a stage reads a list of column names"),
        ("a: " + "[" * 3000 + "]" * 3000, "nested too deeply"),
        ("stages: [{fn: mine.py:twice}]", "does not say which columns it reads and writes"),
    ],
)
def test_a_mistake_is_named_with_its_place(folder, capsys, change, message):
    text = "\n".join(line for line in GOOD.splitlines() if not (line.startswith("train") and "train:" in change))
    code, output = report(folder, capsys, text + "\n" + change)
    assert code == 2
    assert message in output, output


def test_a_missing_file_is_named_with_the_nearest(folder, capsys):
    code, output = report(folder, capsys, GOOD, "data.source=jsonl:dato.jsonl")
    assert code == 2
    assert "data.jsonl" in output


def test_overrides_are_told_from_files(folder):
    files, overrides = split(["p.yaml", "train.lr=1e-4", "more.yaml"])
    assert [str(file) for file in files] == ["p.yaml", "more.yaml"]
    assert overrides == ["train.lr=1e-4"]


def test_validate_loads_nothing_heavy(folder):
    (folder / "p.yaml").write_text(GOOD)
    code = (
        "import sys\nfrom asyncflow.cli.validate import validate\nassert validate(['p.yaml']) == 0\n"
        "loaded = {'torch', 'transformers', 'pyarrow', 'zmq', 'reasoning_gym', 'datasets', 'ray'} & set(sys.modules)\n"
        "assert not loaded, loaded\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=100)
