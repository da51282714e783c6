import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncflow.errors import SchemaError
from asyncflow.storage.batch import Column
from asyncflow.storage.schema import ITEMS

RAGGED = st.lists(st.lists(st.integers(-(2**63), 2**63 - 1), max_size=9), max_size=12)


def ragged(cells):
    return Column.of("list<int64>", [np.array(cell, np.int64) for cell in cells])


def values(column):
    return [cell.tolist() for cell in column]


def some_bits(name, count):
    raw = np.random.default_rng(7).integers(0, 256, count * ITEMS[name].itemsize, np.uint8)
    return (raw & 1 if name == "bool" else raw).view(ITEMS[name])


@pytest.mark.parametrize("name", ITEMS)
def test_any_bits_of_any_dtype_are_kept(name):
    flat = some_bits(name, 40)
    fixed, lists = Column.of(name, flat), Column.ragged(flat, np.array([0, 0, 13, 40]), f"list<{name}>")
    assert fixed.values.tobytes() == lists.values.tobytes() == flat.tobytes()
    assert (fixed.dtype, lists.dtype) == (name, f"list<{name}>")
    assert fixed.equals(Column.of(name, flat.copy()))
    assert lists.lengths.tolist() == [0, 13, 27]


def test_equality_is_of_bits():
    nan = Column.infer(np.array([np.nan, 0.0]))
    assert nan.equals(Column.infer(np.array([np.nan, 0.0])))
    assert not nan.equals(Column.infer(np.array([np.nan, -0.0])))
    assert not nan.equals(Column.infer(np.array([np.nan, 0.0], np.float32)))


@pytest.mark.parametrize(
    ("data", "name"),
    [
        (np.zeros(2, np.int8), "int8"),
        (np.zeros((2, 3, 4), np.float32), "float32[3,4]"),
        ([np.zeros(1, np.float16), np.zeros(0, np.float16)], "list<float16>"),
        (["a", ""], "string"),
        ([b"a", b""], "bytes"),
        ([1, 2], "int64"),
        ([1.0, 2.0], "float64"),
        ([True], "bool"),
        ([[1, 2], []], "list<int64>"),
        (np.array(["a", "b"]), "string"),
        (torch.zeros(2, dtype=torch.bfloat16), "bfloat16"),
        ([torch.zeros(2, dtype=torch.bfloat16)], "list<bfloat16>"),
        (torch.zeros(2, 3), "float32[3]"),
    ],
)
def test_dtypes_are_inferred(data, name):
    assert Column.infer(data).dtype == name


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("float32", np.zeros(2)),
        ("int64", np.zeros(2, np.int32)),
        ("int64", [1.5]),
        ("int8", [300]),
        ("float32", np.zeros((2, 2), np.float32)),
        ("list<float32>", [np.zeros(2)]),
        ("list<int64>", [np.zeros((2, 2), np.int64)]),
        ("string", [b"a"]),
        ("string", ["\ud800"]),
        ("bytes", ["a"]),
        ("bfloat16", [1.0]),
        ("uint16", torch.zeros(1, dtype=torch.bfloat16)),
        ("int64", np.array([None])),
        ("float32[2]", np.zeros((2, 3), np.float32)),
    ],
)
def test_values_are_never_promoted_or_narrowed(name, data):
    with pytest.raises(SchemaError):
        Column.of(name, data)


def test_python_numbers_take_the_dtype_asked_for():
    assert Column.of("float32", [0.5, 1]).array.dtype == np.float32
    assert Column.of("list<uint8>", [[1], [2, 255]])[1].tolist() == [2, 255]
    assert len(Column.of("float32[3]", [])) == 0


@pytest.mark.parametrize("offsets", [[0, 2], [1, 3], [0, 2, 1, 3], [], np.array([0, 3], np.int32)])
def test_offsets_that_do_not_fit_are_refused(offsets):
    with pytest.raises(SchemaError):
        Column.ragged(np.zeros(3), np.asarray(offsets, getattr(offsets, "dtype", np.int64)), "list<float64>")


def test_non_contiguous_arrays_are_taken_by_value():
    column = Column.infer(np.arange(12).reshape(3, 4)[:, ::2])
    assert column.array.tolist() == [[0, 2], [4, 6], [8, 10]]


def test_cells_are_read_only_views():
    column = ragged([[1, 2], [3]])
    with pytest.raises(ValueError, match="read-only"):
        column[0][0] = 9
    assert np.shares_memory(column[1], column.values)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.text(st.characters(exclude_categories=["Cs"]))))
def test_strings_of_any_script_are_kept(texts):
    column = Column.of("string", texts)
    assert column.strings() == texts == list(column)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.binary()))
def test_bytes_are_kept(blobs):
    assert list(Column.of("bytes", blobs)) == blobs


@settings(max_examples=40, deadline=None)
@given(RAGGED, st.data())
def test_take_picks_cells_as_a_list_does(cells, data):
    picks = data.draw(st.lists(st.integers(0, len(cells) - 1), max_size=20)) if cells else []
    taken = ragged(cells).take(np.array(picks, np.int64))
    assert values(taken) == [cells[pick] for pick in picks]


@settings(max_examples=40, deadline=None)
@given(RAGGED, RAGGED)
def test_concat_joins_cells(first, second):
    assert values(Column.concat([ragged(first), ragged(second)])) == first + second


@settings(max_examples=40, deadline=None)
@given(RAGGED, st.booleans(), st.integers(0, 3))
def test_padding_keeps_values_under_the_mask(cells, left, room):
    width = max(map(len, cells), default=0) + room
    padded, mask = ragged(cells).to_padded(fill=-7, left=left, width=width)
    assert padded.shape == mask.shape == (len(cells), width)
    assert mask.dtype == np.uint8
    for row, marks, cell in zip(padded, mask, cells, strict=True):
        gap = [-7] * (width - len(cell))
        assert row.tolist() == (gap + cell if left else cell + gap)
        assert row[marks == 1].tolist() == cell


def test_a_width_that_would_cut_is_refused():
    with pytest.raises(SchemaError, match="longest"):
        ragged([[1, 2, 3]]).to_padded(width=2)


def test_long_runs_and_short_ones_are_gathered_alike():
    cells = [np.arange(i * 1000, i * 1000 + 500) for i in range(8)]
    picks = np.array([5, 6, 0, 0, 7, 3])
    assert values(Column.infer(cells).take(picks)) == [cells[pick].tolist() for pick in picks]


def test_a_range_is_a_slice_without_a_copy():
    column = ragged([[1], [2, 3], [4]])
    assert np.shares_memory(column.take(np.array([1, 2])).values, column.values)


def test_a_torch_copy_cannot_change_cells():
    column = Column.infer(torch.tensor([1.5, -2.0], dtype=torch.bfloat16))
    tensor = column.to_torch()
    assert tensor.dtype == torch.bfloat16
    tensor.zero_()
    assert column.to_torch().tolist() == [1.5, -2.0]


def test_what_a_column_is_not_is_refused():
    with pytest.raises(SchemaError):
        _ = ragged([[1]]).array
    with pytest.raises(SchemaError):
        Column.of("int8", [1]).to_padded()
    with pytest.raises(SchemaError):
        Column.of("int8", [1]).strings()
    with pytest.raises(IndexError):
        ragged([[1]])[1]
