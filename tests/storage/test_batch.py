import subprocess
import sys

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncflow.errors import ColumnMissing, SchemaError
from asyncflow.storage import Batch, Schema
from asyncflow.storage.batch import Column


def everything(count=3):
    return Batch(
        {
            "fixed": np.arange(count, dtype=np.float32),
            "dense": np.arange(count * 6, dtype=np.int16).reshape(count, 2, 3),
            "flag": np.arange(count) % 2 == 0,
            "list": [np.arange(i) for i in range(count)],
            "pixels": [np.arange(i * 4, dtype=np.float32).reshape(i, 2, 2) for i in range(count)],
            "waves": np.arange(count * 2, dtype=np.complex64).reshape(count, 2) * 1j,
            "nothing": np.zeros((count, 0), np.int8),
            "half": Column.ragged(np.arange(count, dtype=np.uint16), np.arange(count + 1), "list<bfloat16>"),
            "text": [f"日本{i}🙂" for i in range(count)],
            "blob": [bytes([i, 255]) for i in range(count)],
        }
    )


def test_a_batch_has_names_rows_and_dtypes():
    batch = everything()
    assert len(batch) == 3
    assert batch.names[:2] == ("fixed", "dense")
    assert batch.schema == Schema(batch.dtypes)
    assert batch.nbytes == sum(batch[name].nbytes for name in batch.names)
    assert batch.select(["text"]).names == ("text",)
    assert batch.with_columns({"more": [1, 2, 3]}).names[-1] == "more"


def test_columns_of_different_lengths_are_refused():
    with pytest.raises(SchemaError, match="different lengths"):
        Batch({"a": [1, 2], "b": [1]})
    with pytest.raises(SchemaError, match="column 'a'"):
        Batch({"a": np.array([object()])})
    with pytest.raises(ColumnMissing, match="'c'"):
        Batch({"a": [1]})["c"]


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 6), st.data())
def test_take_slice_and_concat_agree(count, data):
    batch = everything(count) if count else everything(1).slice(0, 0)
    cut = data.draw(st.integers(0, count))
    joined = Batch.concat([batch.slice(0, cut), batch.slice(cut, count)])
    assert joined.equals(batch)
    assert batch.take(np.arange(count)).equals(batch)
    twice = batch.take([*range(count), *range(count)])
    assert twice.equals(Batch.concat([batch, batch]))
    back = batch.take(np.arange(count)[::-1])
    assert back.take(np.arange(count)[::-1]).equals(batch)


@pytest.mark.parametrize("indices", [[-1], [3], [0, 7]])
def test_rows_that_are_not_there_are_refused(indices):
    with pytest.raises(IndexError):
        everything().take(indices)


@pytest.mark.parametrize("count", [0, 1, 5])
def test_arrow_and_back_is_the_same(count):
    batch = everything(5).slice(0, count)
    records = batch.to_arrow()
    assert records.num_rows == count
    assert pa.types.is_large_list(records.schema.field("list").type)
    assert Batch.from_arrow(records).equals(batch)


def test_sliced_and_foreign_arrow_is_read_right():
    records = pa.record_batch(
        {"t": ["a", "bé", "c"], "l": [[1], [], [2, 3]], "x": [1.0, 2.0, 3.0], "b": [True, False, True]}
    ).slice(1)
    batch = Batch.from_arrow(records)
    assert batch.dtypes == {"t": "string", "l": "list<int64>", "x": "float64", "b": "bool"}
    assert batch["t"].strings() == ["bé", "c"]
    assert [cell.tolist() for cell in batch["l"]] == [[], [2, 3]]
    assert batch["b"].array.tolist() == [False, True]
    assert Batch.from_arrow(everything().to_arrow().slice(1, 2)).equals(everything().slice(1, 3))


def test_nulls_are_refused():
    with pytest.raises(SchemaError, match="nulls"):
        Batch.from_arrow(pa.record_batch({"a": [1, None]}))


def test_nothing_heavy_is_imported():
    code = "import sys, asyncflow.storage; print([m for m in ('torch', 'pyarrow', 'pydantic') if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"
