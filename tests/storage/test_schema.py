import numpy as np
import pytest

from asyncflow.errors import SchemaError
from asyncflow.storage import Schema
from asyncflow.storage.schema import IDENTITY, ITEMS, dtype

SHAPED = ["float32[2,3]", "list<float32[2,3]>", "complex64[1]", "list<bfloat16[4]>", "int8[0]"]


@pytest.mark.parametrize("name", [*ITEMS, *(f"list<{item}>" for item in ITEMS), "string", "bytes", *SHAPED])
def test_a_known_dtype_keeps_its_name(name):
    assert dtype(name).name == name


@pytest.mark.parametrize(
    "name", ["float", "list<string>", "list<list<int8>>", "int64[]", "", "int64[-1]", "list<int8", "int8>"]
)
def test_an_unknown_dtype_is_refused_with_those_there_are(name):
    with pytest.raises(SchemaError, match="known: bool"):
        dtype(name)


@pytest.mark.parametrize(("name", "item"), [("bfloat16", np.uint16), ("float8_e4m3fn", np.uint8)])
def test_dtypes_that_numpy_has_not_are_stored_as_their_bits(name, item):
    assert dtype(f"list<{name}>").item == item
    assert dtype(f"list<{name}[2]>").logical == name
    assert dtype(f"list<{name}[2,3]>").nbytes == 6 * np.dtype(item).itemsize


@pytest.mark.parametrize("shape", ["2,0", "100000000000000000,100000000000000000", "9" * 5000, ",".join("1" * 70)])
def test_shapes_that_numpy_cannot_make_are_refused(shape):
    with pytest.raises(SchemaError):
        dtype(f"list<int8[{shape}]>")


def test_an_empty_axis_hides_no_others():
    with pytest.raises(SchemaError, match="at most"):
        dtype(f"int8[0,{10**9},{10**9}]")


def test_identity_columns_are_part_of_every_schema():
    assert dict(Schema({"reward": "float32"}).columns) == {**IDENTITY, "reward": "float32"}
    assert Schema({"group_id": "int64"}) == Schema({})


@pytest.mark.parametrize("columns", [{"group_id": "int32"}, {"": "int64"}, {f"c{i}": "int8" for i in range(60)}])
def test_a_schema_that_cannot_be_is_refused(columns):
    with pytest.raises(SchemaError):
        Schema(columns)


def test_masks_name_columns():
    schema = Schema({"a": "int8", "b": "int8"})
    assert schema.names(schema.mask(["b", "source"])) == ["source", "b"]
    with pytest.raises(SchemaError, match="no column 'c'"):
        schema.mask(["c"])
