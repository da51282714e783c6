"""The key-value facade with TensorDicts, where tensordict is installed."""

import pytest

from asyncflow.storage.kv import Client

tensordict = pytest.importorskip("tensordict")
torch = pytest.importorskip("torch")


@pytest.fixture
def client(queue):
    return Client(queue)


def test_a_tensordict_comes_back_as_the_public_package_lays_it_out(client):
    ragged = [torch.arange(3), torch.arange(0), torch.arange(5)]
    fields = tensordict.TensorDict(
        {
            "ids": torch.nested.as_nested_tensor(ragged, layout=torch.jagged),
            "dense": torch.arange(12).reshape(3, 4),
            "hidden": torch.randn(3, 2, 5).to(torch.bfloat16),
            "reward": torch.tensor([1.0, 2.0, float("nan")]),
            "text": tensordict.NonTensorStack("a", "b", "c"),
            "item": tensordict.NonTensorStack({"n": 1}, {"n": 2}, {"n": 3}),
        },
        batch_size=3,
    )
    assert client.kv_batch_put(["a", "b", "c"], "p", fields).fields == sorted(fields.keys())
    found = client.kv_batch_get(["c", "a", "b"], "p")
    assert (type(found), found.batch_size) == (tensordict.TensorDict, torch.Size([3]))
    assert [cell.tolist() for cell in found["ids"].unbind()] == [ragged[n].tolist() for n in (2, 0, 1)]
    for name in ("dense", "hidden"):
        assert found[name].layout == torch.jagged
        assert torch.equal(torch.stack(found[name].unbind()), fields[name][[2, 0, 1]])
    assert torch.equal(found["reward"], fields["reward"][[2, 0, 1]].clone()) or found["reward"][0].isnan()
    assert (list(found["text"]), found["item"][1]) == (["c", "a", "b"], {"n": 1})


def test_rows_for_a_task_are_a_tensordict_and_none_an_empty_one(client):
    client.kv_batch_put(["a", "b"], "p", tensordict.TensorDict({"x": torch.arange(2)}, batch_size=2))
    meta = client.get_meta(["x"], 2, "p", task_name="t")
    assert client.get_data(meta)["x"].tolist() == [0, 1]
    assert client.get_data(meta.select_samples([])).batch_size == torch.Size([0])
