import pyarrow as pa
import pytest

from asyncflow.errors import SchemaError
from asyncflow.storage import arrowtype
from asyncflow.storage.schema import Schema, dtype

TYPES = [
    pa.list_(pa.string()),
    pa.large_list(pa.large_string()),
    pa.list_(pa.field("x", pa.int8(), nullable=False)),
    pa.list_(pa.list_(pa.float16(), 3)),
    pa.struct([("a", pa.int64()), pa.field("b c", pa.list_(pa.bool_()), nullable=False)]),
    pa.struct([]),
    pa.map_(pa.string(), pa.map_(pa.int32(), pa.binary())),
    pa.map_(pa.string(), pa.int8(), keys_sorted=True),
    pa.timestamp("us", "+01:00"),
    pa.timestamp("s"),
    pa.duration("ns"),
    pa.date32(),
    pa.time64("us"),
    pa.decimal128(10, 2),
    pa.decimal256(40, -3),
    pa.binary(4),
    pa.large_binary(),
    pa.float64(),
]


@pytest.mark.parametrize("kind", TYPES, ids=str)
def test_a_type_is_read_back_from_its_name(kind):
    name = arrowtype.name(kind)
    assert arrowtype.parse(name) == kind
    assert (dtype(name).name, dtype(name).kind) == (name, "arrow")


@pytest.mark.parametrize(
    ("short", "name"),
    [
        ("arrow<list<string>>", "arrow<list<item: string>>"),
        ("arrow<list<list<float32>>>", "arrow<list<item: list<item: float>>>"),
        ("arrow<struct<a: float64, b: str>>", "arrow<struct<a: double, b: string>>"),
    ],
)
def test_a_short_name_stands_for_the_whole_one(short, name):
    assert Schema({"x": short}) == Schema({"x": name})


@pytest.mark.parametrize(
    "name",
    [
        "arrow<",
        "arrow<>",
        "arrow<lis<string>>",
        "arrow<list<string>",
        "arrow<list<string>>>",
        "arrow<list<>>",
        "arrow<list<string, string>>",
        "arrow<map<string>>",
        "arrow<fixed_size_list<int8>>",
        "arrow<decimal128(99, 2)>",
        "arrow<decimal32(3, 2)>",
        "arrow<timestamp[parsec]>",
        f"arrow<{'list<' * 400}int8{'>' * 400}>",
        f"arrow<struct<{'a: int8, ' * 9000}>>",
    ],
)
def test_a_name_that_is_no_type_is_refused(name):
    with pytest.raises(SchemaError):
        dtype(name)


@pytest.mark.parametrize(
    "kind", [pa.struct([("a: b", pa.int8())]), pa.dictionary(pa.int8(), pa.string()), pa.list_view(pa.int8())]
)
def test_a_type_whose_name_does_not_say_all_is_refused(kind):
    with pytest.raises(SchemaError):
        arrowtype.name(kind)
