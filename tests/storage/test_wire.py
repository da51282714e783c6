import inspect

import msgpack
import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncflow import errors
from asyncflow.errors import WireError
from asyncflow.storage import Batch, frames, wire
from asyncflow.storage.batch import Column


def batch():
    return Batch(
        {
            "x": np.arange(3),
            "long": [np.arange(n) for n in (0, 9000, 1)],
            "text": ["é", "", "🙂"],
            "half": Column.ragged(np.arange(4, dtype=np.uint16), np.array([0, 4, 4, 4]), "list<bfloat16>"),
            "flag": np.array([True, False, True]),
        }
    )


def test_a_call_and_its_batch_come_back():
    parts = wire.encode_call(7, wire.Put("train", b"id", 2), batch())
    call, got = wire.decode_call(parts)
    assert (call.call, call.body.repeat) == (7, 2)
    assert got.equals(batch())
    assert len(parts) == 3, "small buffers share a frame, a large one has its own"


def test_any_messagepack_client_can_speak_it():
    rows = np.array([1, 2**40])
    header = wire.encode_answer(3, wire.Leased(5, wire.pack(rows), 1), batch())[0]
    plain = msgpack.unpackb(header)
    assert plain["body"] == {"kind": "leased", "lease": 5, "rows": rows.astype("<i8").tobytes(), "attempt": 1}
    assert plain["batch"]["columns"][1] == {"name": "long", "dtype": "list<int64>", "bytes": 72008}
    written = msgpack.packb({"call": 1, "body": {"kind": "read", "table": "t", "rows": b"", "columns": ["x"]}})
    assert wire.decode_call([written])[0].body == wire.Read("t", b"", ["x"])


@settings(max_examples=100, deadline=None)
@given(st.lists(st.binary(max_size=40), max_size=3))
def test_noise_is_a_wire_error(parts):
    with pytest.raises(WireError):
        wire.decode_call(parts)


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_a_damaged_message_is_an_error_or_a_message(data):
    parts = [bytearray(part) for part in wire.encode_call(7, wire.Put("train", b"id"), batch())]
    part = data.draw(st.sampled_from(parts))
    part[data.draw(st.integers(0, len(part) - 1))] ^= data.draw(st.integers(1, 255))
    try:
        call, got = wire.decode_call([bytes(part) for part in parts])
    except WireError:
        return
    assert part is parts[0], "damage to cells is always found"
    assert isinstance(call, wire.Call)
    assert got is None or len(got) == 3


def layout(rows, *columns):
    return frames.Layout(rows, [frames.ColumnLayout(*column) for column in columns], 0)


@pytest.mark.parametrize(
    "claim",
    [
        layout(1 << 60, ("x", "int64", 8)),
        layout(-1, ("x", "int64", 8)),
        layout(2, ("x", "int64", 8)),
        layout(1, ("x", "object", 8)),
        layout(1, ("x", "list<int64>", 1 << 50)),
        layout(1, ("x", "list<int64>", 7)),
        layout(1, ("x", "int64[4611686018427387904,4]", 8)),
        layout(1, *[("x", "int64", 8)] * 65),
    ],
)
def test_a_layout_that_contradicts_its_frames_is_refused(claim):
    with pytest.raises(WireError):
        frames.unpack(claim, [bytes(8)])


def forged(column, values, offsets):
    body = values + bytes(-len(values) % 8) + np.array(offsets, np.int64).tobytes()
    claim = frames.Layout(len(offsets) - 1, [frames.ColumnLayout("x", column, len(values))], frames._checksum([body]))
    return frames.unpack(claim, [body])


@pytest.mark.parametrize(
    ("column", "values", "offsets"),
    [
        ("list<int8>", b"abc", [0, 2]),
        ("list<int8>", b"abc", [0, 5, 3]),
        ("list<int8>", b"abc", [-1, 3]),
        ("string", b"\xff\xfe", [0, 2]),
        ("string", "é".encode(), [0, 1, 2]),
        ("list<bool>", b"\x02", [0, 1]),
    ],
)
def test_buffers_that_make_no_column_are_refused(column, values, offsets):
    with pytest.raises(WireError):
        forged(column, values, offsets)


def test_errors_cross_the_wire_as_themselves():
    for name, kind in inspect.getmembers(errors, inspect.isclass):
        if issubclass(kind, errors.StorageError):
            error = wire.raised(wire.failure(kind("what happened")))
            assert (type(error), str(error), name) == (kind, "what happened", kind.__name__)
    assert type(wire.raised(wire.Failure("SystemExit", "no"))) is errors.StorageError


def test_row_ids_are_packed():
    assert wire.unpack(wire.pack(np.array([5, -1]))).tolist() == [5, -1]
    with pytest.raises(WireError):
        wire.unpack(b"1234567")


def test_unknown_fields_are_refused():
    with pytest.raises(WireError):
        wire.decode_call([msgspec.msgpack.encode({"call": 1, "body": {"kind": "seal", "table": "t", "now": True}})])
