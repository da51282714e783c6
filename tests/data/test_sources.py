import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from asyncflow.config.model import Data
from asyncflow.data.sources import items, text
from asyncflow.errors import DataError, MissingDependency

ROWS = [{"prompt": "a", "answer": "b", "meta": {"x": [1, 2]}}, {"prompt": "c", "answer": None, "meta": {"x": []}}]


def test_jsonl_skips_blank_lines_and_a_byte_order_mark(tmp_path):
    file = tmp_path / "p.jsonl"
    file.write_bytes(b"\xef\xbb\xbf" + b"\n\n".join(json.dumps(row).encode() for row in ROWS) + b"\n  \n")
    assert items(Data(source=f"jsonl:{file}")) == ROWS
    assert items(Data(source=f"jsonl:{file}", size=1)) == ROWS[:1]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"{'a': 1}", r"p.jsonl:3:2: not valid JSON: Expecting property name"),
        (b'{"a": "\xff"}', r"p.jsonl:3: not UTF-8: .* at byte 8"),
        (b"[1]", r"p.jsonl:3: expected a JSON object, found list"),
    ],
)
def test_a_bad_line_is_named(tmp_path, line, message):
    file = tmp_path / "p.jsonl"
    file.write_bytes(b'{"a": 1}\n\n' + line + b"\n")
    with pytest.raises(DataError, match=message):
        items(Data(source=f"jsonl:{file}"))


def test_parquet(tmp_path):
    parquet.write_table(pa.Table.from_pylist(ROWS), tmp_path / "p.parquet")
    assert items(Data(source=f"parquet:{tmp_path / 'p.parquet'}")) == ROWS
    (tmp_path / "q.parquet").write_bytes(b"no")
    with pytest.raises(DataError, match=r"q\.parquet: not readable as Parquet"):
        items(Data(source=f"parquet:{tmp_path / 'q.parquet'}"))


@pytest.mark.parametrize("python", [ROWS, tuple(ROWS), (row for row in ROWS)])
def test_python_takes_any_iterable_of_mappings(python):
    assert items(Data(source="python"), python) == ROWS


@pytest.mark.parametrize(
    ("data", "python", "message"),
    [
        (Data(source="python"), None, "no dataset was handed over"),
        (Data(source="python"), [], "python: no items"),
        (Data(source="python"), ["train", "test"], "item 0 is a str: expected a mapping of fields"),
        (Data(source="python"), {"train": []}, "found a mapping of train: hand over one of them"),
        (Data(source="python", size=3), ROWS, "data.size is 3, but there are only 2 items"),
        (Data(source="jsonl:nowhere.jsonl"), None, "nowhere.jsonl does not exist in"),
        (Data(source="json:x"), None, "unknown kind of source 'json' - did you mean 'jsonl'"),
    ],
)
def test_unusable_data_is_refused(data, python, message):
    with pytest.raises(DataError, match=message):
        items(data, python)


def test_an_item_is_written_as_json():
    item = {"a": np.arange(2), "b": np.float32(0.5), "c": {3, 1}, "d": Path("x"), "é": "é"}
    assert json.loads(text(item)) == {"a": [0, 1], "b": 0.5, "c": [1, 3], "d": "x", "é": "é"}
    assert "é" in text(item)


def test_a_missing_package_is_named_with_its_command(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(MissingDependency, match=r"pip install 'asyncflow-rl\[tasks\]'"):
        items(Data(source="reasoning_gym:chain_sum", size=2))


REASONING_GYM = """
import json
from asyncflow.config.model import Data
from asyncflow.data.sources import items
from asyncflow.errors import DataError
from asyncflow.rewards.signature import Sample
from asyncflow.rewards.spec import RewardSpec
from asyncflow.data.sources import text
data = Data(source="reasoning_gym:chain_sum", size=3, options={"min_terms": 2, "max_terms": 2})
made = items(data, seed=1)
assert made == items(data, seed=1) != items(data, seed=2)
assert all({"question", "answer", "metadata"} <= set(item) for item in made)
for task in ("chain_sum", "rearc"):
    source = f"reasoning_gym:{task}"
    made = items(Data(source=source, size=2), seed=1)
    score = RewardSpec("reasoning_gym", source=source, size=2, seed=1).scorer()
    own = [score(Sample(f" {item['answer']} ", item=text(item))) for item in made]
    print(own, score(Sample("?", item=text(made[0]))) < 0.5)
for bad in ({"source": "reasoning_gym:chain_sums"}, {"source": "reasoning_gym:chain_sum", "options": {"min_term": 1}}):
    try:
        items(Data(size=1, **bad))
    except DataError as error:
        print(error)
"""


def test_reasoning_gym_makes_items_and_scores_them():
    root = str(Path(__file__).parents[2])
    code = [sys.executable, "-c", REASONING_GYM]
    done = subprocess.run(code, capture_output=True, text=True, env={"PYTHONPATH": root}, check=False, timeout=110)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[:2] == ["[1.0, 1.0] True"] * 2
    assert lines[2].endswith("no task 'chain_sums' - did you mean 'chain_sum'?")
    assert lines[3].startswith("data.options do not fit the reasoning_gym task chain_sum: ")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_hugging_face_dataset_is_a_source():
    datasets = pytest.importorskip("datasets")
    rows = [
        {"prompt": "1+1", "answer": "2", "extra": {"level": 1}},
        {"prompt": "2+2", "answer": "4", "extra": {"level": 2}},
    ]
    assert items(Data(source="python"), datasets.Dataset.from_list(rows)) == rows
