import numpy as np
import pytest

from asyncflow.errors import WireError
from asyncflow.storage import Batch, frames

CUT = 40_000


@pytest.fixture(autouse=True)
def _cut(monkeypatch):
    monkeypatch.setattr(frames, "MAX_FRAME", CUT)


def large(values=30_001):
    return Batch({"x": np.arange(3), "long": [np.arange(values, dtype=np.int32), np.zeros(0, np.int32), [7]]})


@pytest.mark.parametrize("values", [CUT // 4 - 1, CUT // 4, CUT // 4 + 1, CUT // 2 - 1, 30_001])
def test_a_column_over_the_limit_is_cut_and_joined(values):
    layout, parts = frames.pack(large(values))
    assert [len(part) for part in parts[1:-1]] == [CUT] * (len(parts) - 2)
    assert sum(len(part) for part in parts[1:]) == 4 * (values + 1)
    assert frames.unpack(layout, parts).equals(large(values))


def test_what_is_cut_is_not_copied():
    batch = large()
    assert all(
        np.shares_memory(np.frombuffer(part, np.uint8), batch["long"].bits) for part in frames.pack(batch)[1][1:]
    )


def claim(size, checksum=0):
    return frames.Layout(1, [frames.ColumnLayout("x", "bytes", size)], checksum)


@pytest.mark.parametrize(
    "sizes",
    [
        [16, CUT],
        [16, CUT, 9_999],
        [16, CUT, 10_001],
        [16, CUT, CUT, 10_000],
        [16, 10_000, CUT],
        [16, 25_000, 25_000],
        [16, CUT + 10_000],
        [16, CUT, 5_000, 5_000],
        [CUT + 10_016],
    ],
)
def test_frames_that_are_not_those_of_the_layout_are_refused(sizes):
    with pytest.raises(WireError, match="bytes where the"):
        frames.unpack(claim(CUT + 10_000), [bytes(size) for size in sizes])


def test_nothing_is_allocated_for_a_size_that_is_only_claimed():
    with pytest.raises(WireError, match="bytes where the"):
        frames.unpack(claim(1 << 60), [bytes(16), bytes(CUT)])


def test_damage_in_a_piece_is_found():
    layout, parts = frames.pack(large())
    parts[2] = bytes(len(parts[2]))
    with pytest.raises(WireError, match="checksum"):
        frames.unpack(layout, parts)


def test_columns_over_the_limit_go_through_a_queue(queue):
    batch = large()
    table = queue.create_table("large", batch.schema)
    rows = table.put(batch)
    assert table.read(rows, batch.names).equals(batch)
    assert table.read(rows[::-1], batch.names).equals(batch.take([2, 1, 0]))
