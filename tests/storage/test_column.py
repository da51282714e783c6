import numpy as np
import pytest
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
        ([1, 2**63], "uint64"),
        ([True], "bool"),
        ([[1, 2], []], "list<int64>"),
        (np.array(["a", "b"]), "string"),
        (np.zeros(2, np.complex64), "complex64"),
        ([1j], "complex128"),
        ([np.zeros((2, 3, 1)), np.zeros((0, 3, 1))], "list<float64[3,1]>"),
        ([[[1, 2]], []], "list<int64[2]>"),
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
        ("int64", [1, 2**63]),
        ("uint64", [-1, 2**63]),
        ("int64", [1.0, 2.0**64]),
        ("int8", [300]),
        ("float32", np.zeros((2, 2), np.float32)),
        ("list<float32>", [np.zeros(2)]),
        ("list<int64>", [np.zeros((2, 2), np.int64)]),
        ("string", [b"a"]),
        ("string", ["\ud800"]),
        ("bytes", ["a"]),
        ("bfloat16", [1.0]),
        ("float8_e5m2", [1]),
        ("float8_e5m2", np.zeros(1, np.int8)),
        ("complex64", np.zeros(1, np.complex128)),
        ("float32", np.zeros(1, np.complex64)),
        ("float32", [1j]),
        ("float64[2]", [np.zeros(2, np.float32)]),
        ("float32[2]", [np.zeros(2, np.float32), np.zeros(3, np.float32)]),
        ("list<float32[2]>", [np.zeros((1, 3), np.float32)]),
        ("list<float32[2]>", [np.zeros(2, np.float32)]),
        ("list<float32[2]>", np.zeros((1, 1, 3), np.float32)),
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


EXTREMES = {
    "float": [0.0, -0.0, np.nan, -np.nan, np.inf, -np.inf, 5e-324, 1e-45, 6e-8, 1.5],
    "complex": [complex(-0.0, np.nan), complex(np.inf, -0.0)],
}


@pytest.mark.parametrize("name", [name for name in ITEMS if name[:4] in ("floa", "comp") and name[:6] != "float8"])
def test_extreme_values_are_kept(name):
    kind = name.rstrip("0123456789")
    data = np.array(EXTREMES[kind], name)
    for column in (Column.infer(data), Column.of(name, list(data)), Column.infer([data, data[:0]])):
        assert column.values.tobytes() == data.tobytes()


@pytest.mark.parametrize("name", [name for name in ITEMS if "int" in name])
def test_the_ends_of_integers_are_kept(name):
    ends = [int(np.iinfo(name).min), int(np.iinfo(name).max)]
    assert Column.of(name, ends).array.tolist() == ends
    with pytest.raises(SchemaError):
        Column.of(name, [ends[1] + 1])


@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 4), (2, 0, 3), (1, 1, 1, 1, 1), (2, 70_000)])
def test_any_shape_is_kept(shape):
    column = Column.infer(np.ones(shape, np.int16))
    assert (column.array.shape, column.take(np.arange(len(column))[::-1]).array.shape) == (shape, shape)


STRIDED = [np.arange(24).reshape(4, 6)[::2, ::-3], np.arange(24).reshape(4, 6).T, np.broadcast_to(np.int64(3), (4, 2))]


@pytest.mark.parametrize("data", [*STRIDED, np.arange(4).astype(">i4"), np.asfortranarray(np.ones((2, 3)))])
def test_arrays_of_any_layout_are_taken_by_value(data):
    assert Column.infer(data).array.tolist() == data.tolist()
    if data.ndim == 2:
        assert [cell.tolist() for cell in Column.of(f"list<{data.dtype.name}>", data)] == data.tolist()


def test_sequences_of_vectors_are_ragged_in_their_first_axis():
    cells = [np.arange(6.0).reshape(3, 2), np.zeros((0, 2)), np.full((1, 2), -1.0)]
    column = Column.infer(cells)
    assert (column.dtype, column.lengths.tolist(), column.item_bytes) == ("list<float64[2]>", [3, 0, 1], 16)
    back = column.take(np.array([2, 0, 1, 2]))
    assert values(back) == [cells[pick].tolist() for pick in (2, 0, 1, 2)]
    assert Column.concat([column, back]).slice(3, 7).equals(back)
    padded, mask = column.to_padded(fill=9, left=True)
    assert (padded.shape, mask.tolist()) == ((3, 3, 2), [[1, 1, 1], [0, 0, 0], [0, 0, 1]])
    assert padded[2].tolist() == [[9, 9], [9, 9], [-1, -1]]


def test_fixed_cells_come_as_a_list_of_arrays_too():
    cells = [np.arange(6, dtype=np.int8).reshape(2, 3), np.ones((2, 3), np.int8)]
    assert np.array_equal(Column.of("int8[2,3]", cells).array, cells)


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


@pytest.mark.parametrize(
    ("name", "fill", "bits"),
    [("bool", 0, 0), ("bool", 1, 1), ("uint8", 255, 255), ("bfloat16", 0, 0), ("float8_e4m3fn", 0.0, 0)],
)
def test_what_is_filled_in_is_a_value_of_the_dtype(name, fill, bits):
    column = Column.ragged(some_bits(name, 3), np.array([0, 3, 3]), f"list<{name}>")
    assert column.to_padded(fill)[0][1].view(np.uint8).tolist()[:: column.item_bytes] == [bits] * 3


@pytest.mark.parametrize(("name", "fill"), [("uint8", -1), ("int64", 0.5), ("bool", 2), ("float32", 1e300)])
def test_a_fill_that_does_not_fit_is_refused(name, fill):
    with pytest.raises(SchemaError):
        Column.of(f"list<{name}>", [[], []]).to_padded(fill)


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


def test_what_a_column_is_not_is_refused():
    with pytest.raises(SchemaError):
        _ = ragged([[1]]).array
    with pytest.raises(SchemaError):
        Column.of("int8", [1]).to_padded()
    with pytest.raises(SchemaError):
        Column.of("int8", [1]).strings()
    with pytest.raises(IndexError):
        ragged([[1]])[1]
