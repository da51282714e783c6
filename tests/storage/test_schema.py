import numpy as np
import pytest

from asyncflow.errors import SchemaError
from asyncflow.storage import Schema
from asyncflow.storage.schema import IDENTITY, ITEMS, dtype


@pytest.mark.parametrize("name", [*ITEMS, *(f"list<{item}>" for item in ITEMS), "string", "bytes", "float32[2,3]"])
def test_a_known_dtype_keeps_its_name(name):
    assert dtype(name).name == name


@pytest.mark.parametrize("name", ["float", "list<string>", "list<list<int8>>", "int64[]", "", "int64[-1]", "complex64"])
def test_an_unknown_dtype_is_refused_with_those_there_are(name):
    with pytest.raises(SchemaError, match="known: bool"):
        dtype(name)


def test_bfloat16_is_stored_as_its_bits():
    assert dtype("list<bfloat16>").item == np.uint16
    assert dtype("list<bfloat16>").logical == "bfloat16"


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
