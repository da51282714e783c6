import datetime
import decimal
from contextlib import suppress

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncflow.errors import SchemaError, WireError
from asyncflow.storage import Batch, Schema, frames, nested
from asyncflow.storage.column import Column

CALLS = pa.map_(pa.string(), pa.int64())
CHAT = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string()), ("calls", CALLS)]))
VECTORS = pa.list_(pa.list_(pa.int8(), 2))
ARRAYS = {
    "texts": pa.array([["a", None, "é"], None, [], ["xyz"]]),
    "lists": pa.array([[[1, 2], []], [], None, [[None], None]]),
    "struct": pa.array([{"a": 1, "b": [True, None]}, None, {"a": None, "b": None}, {"a": 4, "b": []}]),
    "map": pa.array([[("a", 1)], None, [], [("b", None), ("c", 3)]], pa.map_(pa.string(), pa.int64())),
    "dense": pa.array([[1, 2, 3], None, [4, 5, None], [1, 1, 1]], pa.list_(pa.int64(), 3)),
    "decimal": pa.array([decimal.Decimal("1.20"), None] * 2, pa.decimal128(10, 2)),
    "time": pa.array([datetime.datetime(2020, 1, 1), None] * 2, pa.timestamp("us", "UTC")),
    "numbers": pa.array([1.5, None, float("inf"), -0.0]),
    "flags": pa.array([True, None, False, True]),
    "large": pa.array([["a"], None, ["b" * 70_000], []], pa.large_list(pa.large_string())),
    "whole": pa.array([[1], [2, 3], [], [4]], pa.list_(pa.field("x", pa.int8(), nullable=False))),
    "nothing": pa.array([{}, None, {}, {}], pa.struct([])),
    "chat": pa.array([[{"role": "user", "content": "日本", "calls": [("f", 1)]}], [], None, [{"role": None}]], CHAT),
}


def column(array):
    return Column.of(f"arrow<{array.type}>", array)


@pytest.mark.parametrize("name", ARRAYS)
def test_an_array_comes_back_equal(name):
    array = ARRAYS[name]
    for each in (array, array[1:], array[1:3], array[:0], array[3:], pa.concat_arrays([array, array])[3:]):
        back = column(each).to_arrow()
        assert back.equals(each)
        assert back.type == each.type
    assert list(column(array)) == array.to_pylist()
    assert column(array)[-1] == array[-1].as_py()


@pytest.mark.parametrize("name", ARRAYS)
def test_cells_are_picked_and_joined_like_any(name):
    array = ARRAYS[name]
    picks = np.array([3, 3, 0, 1, 2, 0])
    taken = column(array).take(picks)
    assert taken.to_arrow().equals(array.take(pa.array(picks)))
    assert Column.concat([taken, column(array)]).slice(4, 9).to_arrow().to_pylist() == [
        array[pick].as_py() for pick in (2, 0, 0, 1, 2)
    ]


@pytest.mark.parametrize("name", ARRAYS)
def test_cells_are_taken_from_python_values_too(name):
    array = ARRAYS[name]
    assert Column.of(f"arrow<{array.type}>", array.to_pylist()).to_arrow().equals(array)
    assert Column.of(f"arrow<{array.type}>", pa.chunked_array([array[:1], array[1:]])).to_arrow().equals(array)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.none() | st.lists(st.none() | st.lists(st.none() | st.text(max_size=3), max_size=3), max_size=3)))
def test_any_nesting_of_nulls_and_empty_lists_is_kept(rows):
    array = pa.array(rows, pa.list_(pa.list_(pa.string())))
    assert column(array).to_arrow().equals(array)


def test_what_lies_under_a_null_is_not_stored():
    offsets, mask = pa.array([0, 2, 4], pa.int32()), pa.array([True, False])
    hidden = pa.ListArray.from_arrays(offsets, pa.array([1, 2, 3, 4]), mask=mask)
    plain = pa.array([None, [3, 4]])
    assert column(hidden).equals(column(plain))
    assert column(hidden).to_arrow().equals(plain)


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("arrow<list<string>>", pa.array([[1]])),
        ("arrow<list<string>>", [[1]]),
        ("arrow<list<string>>", ["a", 1]),
        ("arrow<list<item: int8 not null>>", pa.array([[1, None]], pa.list_(pa.int8()))),
        ("arrow<int8>", [300]),
        ("arrow<int8>", pa.array([1])),
        ("list<int64>", pa.array([[1, None]])),
        ("int64", pa.array([1, None])),
    ],
)
def test_values_of_another_type_are_refused(name, data):
    with pytest.raises(SchemaError):
        Column.of(name, data)


def test_nulls_where_none_are_allowed_are_refused():
    inner = pa.array([1, None])
    array = pa.ListArray.from_arrays(pa.array([0, 2], pa.int32()), inner, pa.list_(pa.field("x", pa.int64(), False)))
    with pytest.raises(SchemaError, match="allows none"):
        column(array)


@pytest.mark.parametrize(
    ("data", "dtype"),
    [
        (pa.array([1, 2]), "int64"),
        (pa.array([[1.0], []]), "list<float64>"),
        (pa.array([[[1, 2]], []], VECTORS), "list<int8[2]>"),
        (pa.array(["a"]), "string"),
        (pa.array([[1, None]]), "arrow<list<item: int64>>"),
        (pa.array([["a"]]), "arrow<list<item: string>>"),
        (
            pa.array([[[1, 2], None]], VECTORS),
            "arrow<list<item: fixed_size_list<item: int8>[2]>>",
        ),
        (pa.array([{"a": 1}]), "arrow<struct<a: int64>>"),
    ],
)
def test_the_dtype_follows_from_the_type(data, dtype):
    found = Column.infer(data)
    assert found.dtype == dtype
    assert found.to_arrow().to_pylist() == data.to_pylist()


def test_batches_hold_nested_columns():
    records = pa.record_batch(ARRAYS)
    batch = Batch.from_arrow(pa.record_batch({name: ARRAYS[name] for name in ("texts", "struct", "chat", "map")}))
    assert batch.dtypes["texts"] == "arrow<list<item: string>>"
    back = batch.to_arrow()
    assert all(back[name].equals(records[name]) for name in batch.names)
    assert Batch.from_arrow(back).equals(batch)


def test_nested_columns_go_through_a_queue(queue):
    arrays = {name: ARRAYS[name] for name in ARRAYS if name not in ("nothing", "flags")}
    table = queue.create_table("nested", Schema({name: f"arrow<{array.type}>" for name, array in arrays.items()}))
    rows = table.put({"texts": arrays["texts"]})
    table.write(rows[[2, 0]], {"chat": arrays["chat"].take(pa.array([2, 0]))})
    table.write(rows[[1, 3]], {"chat": arrays["chat"].take(pa.array([1, 3])).to_pylist()})
    table.write(rows, {name: array for name, array in arrays.items() if name not in ("texts", "chat")})
    back = table.read(rows[::-1], list(arrays))
    for name, array in arrays.items():
        assert back[name].to_arrow().equals(array.take(pa.array([3, 2, 1, 0])))
    table.write(rows, {"texts": arrays["texts"]})


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_damaged_cells_are_an_error_or_an_array(data):
    array = ARRAYS[data.draw(st.sampled_from(["texts", "struct", "chat", "map", "lists"]))]
    cells, offsets = nested.encode(array)
    damaged = cells.copy()
    damaged[data.draw(st.integers(0, len(cells) - 1))] ^= data.draw(st.integers(1, 255))
    with suppress(SchemaError):
        assert len(nested.decode(array.type, damaged, offsets)) == len(array)


@pytest.mark.parametrize("kind", [pa.list_(pa.bool_()), pa.list_(pa.list_(pa.string())), pa.list_(pa.int8(), 1 << 30)])
def test_nothing_is_made_for_lengths_that_are_only_claimed(kind):
    cells = np.frombuffer(b"\0" + b"\xff" * 3 + b"\x0f" + b"\0" * 9, np.uint8)
    with pytest.raises(SchemaError, match="less than its values need"):
        nested.decode(kind, cells, np.array([0, len(cells)]))


def test_items_without_bytes_are_refused():
    with pytest.raises(SchemaError, match="at least one byte"):
        Column.of("arrow<list<struct<>>>", [[{}, {}]])


def test_cells_of_another_type_are_refused():
    cells = Column.of("arrow<list<int8>>", [[1], [2, 3]])
    for name in ("arrow<list<int16>>", "arrow<struct<>>", "arrow<list<list<int8>>>"):
        with pytest.raises(SchemaError, match="cell"):
            Column.ragged(cells.values, cells.offsets, name).to_arrow()


def test_an_unknown_type_from_the_wire_is_refused():
    with pytest.raises(WireError, match="unknown Arrow type"):
        frames.unpack(frames.Layout(0, [frames.ColumnLayout("x", "arrow<nope>", 0)], 0), [bytes(8)])
