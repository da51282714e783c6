import numpy as np
import pytest
import torch

from asyncflow.errors import SchemaError
from asyncflow.storage import Batch, Schema
from asyncflow.storage.column import Column
from asyncflow.storage.schema import ITEMS, RAW


def bits(name, count=12):
    """A tensor with each bit set somewhere, NaN and both zeros among its values."""
    raw = np.random.default_rng(5).integers(0, 256, count * ITEMS[name].itemsize, np.uint8)
    plain = torch.from_numpy((raw & 1 if name == "bool" else raw).view(ITEMS[name]))
    return plain.view(getattr(torch, name)) if name in RAW else plain


def same(left, right):
    assert left.dtype == right.dtype
    assert left.shape == right.shape
    return left.contiguous().view(torch.uint8).equal(right.contiguous().view(torch.uint8))


@pytest.mark.parametrize("name", ITEMS)
def test_every_dtype_comes_and_goes(name):
    tensor = bits(name).reshape(4, 3)
    dense, ragged = Column.infer(tensor), Column.of(f"list<{name}>", tensor)
    assert (dense.dtype, ragged.dtype) == (f"{name}[3]", f"list<{name}>")
    assert same(dense.to_torch(), tensor)
    assert same(ragged.to_torch(), tensor.reshape(-1))
    assert Column.infer([tensor[0], tensor[1, :2]]).values.tobytes() == dense.values.tobytes()[: 5 * dense.item_bytes]


@pytest.mark.parametrize("name", ["float32", "bfloat16", "float8_e5m2", "bool"])
def test_a_tensor_is_on_the_memory_of_the_column(name):
    column = Column.infer(bits(name))
    assert not column.values.flags.writeable
    assert column.to_torch().data_ptr() == column.values.ctypes.data
    assert column.to_torch(copy=True).data_ptr() != column.values.ctypes.data


def test_a_tensor_keeps_the_memory_alive():
    tensor = Column.infer(np.arange(100_000)).copy().to_torch()
    assert tensor.equal(torch.arange(100_000))


def test_a_copy_may_be_written():
    column = Column.infer(torch.tensor([1.5, -2.0], dtype=torch.bfloat16))
    column.to_torch(copy=True).zero_()
    assert column.to_torch().tolist() == [1.5, -2.0]


LAYOUTS = {
    "strided": torch.arange(24.0).reshape(4, 6)[::2, 1::3],
    "transposed": torch.arange(6.0).reshape(2, 3).T,
    "expanded": torch.ones(1).expand(3, 2),
    "bfloat16": torch.arange(24.0).bfloat16().reshape(4, 6)[:, ::5],
    "grown": torch.ones(2, 2, requires_grad=True) * 2,
    "parameter": torch.nn.Parameter(torch.ones(2, 2)),
    "conjugate": torch.tensor([[1 + 2j, 3 - 1j]]).conj(),
    "negative": torch.tensor([[1 + 2j, 3 - 1j]]).conj().imag,
    "empty": torch.empty(2, 0, 3),
    "no rows": torch.empty(0, 3),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_tensors_of_any_layout_are_taken_by_value(layout):
    tensor = LAYOUTS[layout]
    assert Column.infer(tensor).to_torch().tolist() == tensor.tolist()


def test_ragged_columns_are_nested_tensors():
    cells = [torch.arange(3), torch.arange(0), torch.arange(2)]
    column = Column.infer(cells)
    nested = column.to_nested()
    assert [cell.tolist() for cell in nested.unbind()] == [cell.tolist() for cell in cells]
    assert nested.values().data_ptr() == column.values.ctypes.data
    assert nested.offsets().tolist() == [0, 3, 3, 5]
    assert Column.infer(nested).equals(column)
    assert column.to_nested(copy=True).values().data_ptr() != column.values.ctypes.data


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_nested_tensors_of_vectors_are_taken(dtype):
    cells = [torch.ones(2, 3, dtype=dtype), torch.zeros(4, 3, dtype=dtype)]
    nested = torch.nested.nested_tensor(cells, layout=torch.jagged)
    column = Column.infer(nested)
    assert column.dtype == f"list<{str(dtype).removeprefix('torch.')}[3]>"
    assert column.equals(Column.infer(cells))
    assert same(column.to_nested().values(), torch.cat(cells))


def test_a_narrowed_nested_tensor_has_only_what_it_shows():
    nested = torch.nested.narrow(
        torch.arange(12).reshape(2, 6), 1, torch.tensor([0, 1]), torch.tensor([2, 3]), layout=torch.jagged
    )
    assert [cell.tolist() for cell in Column.infer(nested)] == [[0, 1], [7, 8, 9]]


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("uint16", torch.zeros(1, dtype=torch.bfloat16)),
        ("bfloat16", torch.zeros(1)),
        ("float8_e5m2", torch.zeros(1).to(torch.float8_e4m3fn)),
        ("list<float32>", [torch.zeros(1), torch.zeros(1, dtype=torch.float64)]),
        ("list<float32[2]>", [torch.zeros(1, 2), torch.zeros(1, 3)]),
        ("list<float32>", [torch.tensor(1.0)]),
        ("float32[2]", [torch.zeros(2), torch.zeros(3)]),
        ("float32[2]", torch.zeros(2, 2).to_sparse()),
        ("float32", torch.tensor(1.0)),
        ("float32", torch.zeros(1, device="meta")),
    ],
)
def test_tensors_are_never_promoted_narrowed_or_cut(name, data):
    with pytest.raises(SchemaError):
        Column.of(name, data)


def test_lists_of_tensors_are_cells():
    rewards, frames = [torch.tensor(1.0), torch.tensor(-0.0)], [torch.ones(2, 2), torch.zeros(2, 2)]
    assert Column.infer(rewards).to_torch().tolist() == [1.0, -0.0]
    assert Column.of("float32[2,2]", frames).to_torch().equal(torch.stack(frames))


@pytest.mark.parametrize(("fill", "left"), [(1.0, False), (-3.0, True), (float("inf"), False)])
@pytest.mark.parametrize("name", ["bfloat16", "float8_e5m2"])
def test_padding_fills_in_the_number(name, fill, left):
    dtype = getattr(torch, name)
    values, mask = Column.infer([torch.ones(3).to(dtype), torch.ones(1).to(dtype)]).to_padded(fill, left, 4)
    padded = torch.from_numpy(values).view(dtype).float()
    assert padded[1].tolist() == ([fill] * 3 + [1.0] if left else [1.0] + [fill] * 3)
    assert mask.sum(axis=1).tolist() == [3, 1]


def test_tensors_go_through_a_queue(queue):
    batch = {
        "ids": [torch.arange(3), torch.arange(0)],
        "logp": torch.tensor([[0.5, -0.0], [1.0, 2.0]], dtype=torch.bfloat16).T,
        "hidden": torch.nested.nested_tensor([torch.ones(1, 4), torch.zeros(2, 4)], layout=torch.jagged),
    }
    table = queue.create_table("tensors", Batch(batch).schema)
    rows = table.put({name: batch[name] for name in ("ids", "logp")})
    table.write(rows, {"hidden": batch["hidden"]})
    back = table.read(rows, list(batch))
    assert back.equals(Batch(batch))
    assert same(back["logp"].to_torch(), batch["logp"])
    assert table.schema == Schema({"ids": "list<int64>", "logp": "bfloat16[2]", "hidden": "list<float32[4]>"})


def test_what_makes_no_tensor_is_refused():
    with pytest.raises(SchemaError, match="no nested tensor"):
        Column.infer(np.zeros(2)).to_nested()
