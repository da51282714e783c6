"""The key-value facade, over every transport."""

import inspect
import pickle
import subprocess
import sys

import numpy as np
import pytest

from asyncflow.errors import CellConflict, ColumnMissing, RowGone, SchemaError, StorageError, WaitTimeout
from asyncflow.storage import kv
from asyncflow.storage.kv import Client, KVBatchMeta


@pytest.fixture(autouse=True)
def without_tensordict(monkeypatch):
    """Return what there is without it, wherever the tests run."""
    monkeypatch.setattr("asyncflow.storage.fields.find_spec", lambda name: None)


@pytest.fixture
def client(queue):
    return Client(queue, polling=True)


def ragged(*lengths):
    return [np.arange(length) + length for length in lengths]


def test_fields_come_back_in_the_order_of_the_keys(client):
    fields = {
        "ids": ragged(3, 0, 5),
        "same": np.arange(6, dtype=np.int16).reshape(3, 2),
        "score": np.array([0.5, -1, np.nan], np.float32),
        "image": np.arange(24, dtype=np.uint8).reshape(3, 2, 4),
        "text": ["a", "", "日本"],
        "item": [{"n": 1, "list": [1, None]}, None, "x"],
    }
    meta = client.kv_batch_put(["a", "b", "c"], "train", fields)
    assert (meta.keys, meta.fields, meta.tags) == (["a", "b", "c"], sorted(fields), [{}, {}, {}])
    found = client.kv_batch_get(["c", "a"], "train")
    assert (sorted(found), found.batch_size) == (sorted(fields), (2,))
    assert [cell.tolist() for cell in found["ids"]] == [fields["ids"][2].tolist(), fields["ids"][0].tolist()]
    for name in ("same", "score", "image"):
        assert found[name].dtype == fields[name].dtype
        np.testing.assert_array_equal(found[name], fields[name][[2, 0]])
    assert (found["text"], found["item"]) == (["日本", "a"], ["x", {"n": 1, "list": [1, None]}])


def test_what_a_reader_got_is_its_own(client):
    client.kv_batch_put(["a"], "p", {"x": np.zeros(1)})
    client.kv_batch_get("a", "p")["x"][:] = 9
    assert client.kv_batch_get("a", "p")["x"].tolist() == [0]


def test_fields_come_piece_by_piece_and_from_anyone(clients):
    first, second = Client(clients()), Client(clients())
    first.kv_batch_put(["a", "b"], "p", {"x": np.arange(2)})
    meta = second.kv_batch_put(["b", "c"], "p", {"y": np.arange(2)})
    assert meta.fields == ["y"]
    assert second.kv_batch_put(["b"], "p", {"z": np.ones((1, 2))}).fields == ["x", "y", "z"]
    assert list(first.kv_batch_get(["b", "c"], "p")) == ["y"]
    assert first.kv_batch_get("b", "p", ["z", "x"])["z"].tolist() == [[1, 1]]
    with pytest.raises(ColumnMissing, match="partition 'p': x not put"):
        first.kv_batch_get(["a", "c"], "p", "x")
    with pytest.raises(ColumnMissing, match="nothing not put"):
        first.kv_batch_get("a", "p", "nothing")


def test_keys_that_are_unknown_are_left_out_and_none_is_an_error(client):
    client.kv_batch_put(["a"], "p", {"x": np.arange(1)})
    assert client.kv_batch_get(["none", "a"], "p")["x"].tolist() == [0]
    for keys, partition in (("none", "p"), ("a", "other")):
        with pytest.raises(ValueError, match=f"partition '{partition}'"):
            client.kv_batch_get(keys, partition)


def test_tags_merge_and_are_listed_without_data(client):
    client.kv_batch_put(["a", "b"], "p", tags=[{"state": "running"}, {"n": 2}])
    assert client.kv_batch_put(["a"], "p", {"x": np.ones(1)}, [{"state": "done", "m": 1}]).tags == [
        {"state": "done", "m": 1}
    ]
    client.kv_batch_put(["c"], "q", {"x": np.ones(1)})
    listed = {"a": {"state": "done", "m": 1}, "b": {"n": 2}}
    assert client.kv_list("p") == {"p": listed}
    assert client.kv_list() == {"p": listed, "q": {"c": {}}}
    assert client.kv_list("none") == {}


def test_clear_removes_keys_with_their_tags_and_leaves_others(client, queue):
    client.kv_batch_put(["a", "b"], "p", {"x": np.arange(2)}, [{"n": 1}, {"n": 2}])
    client.kv_clear(["a", "none"], "p")
    client.kv_clear("a", "nowhere")
    assert client.kv_list() == {"p": {"b": {"n": 2}}}
    client.kv_clear("b", "p")
    assert client.kv_list("p") == {"p": {}}
    assert [table.bytes for name, table in queue.status().tables.items() if "fields" not in name] == [0, 0]
    meta = client.kv_batch_put(["a"], "p", {"x": np.array([7])})
    assert (meta.tags, client.kv_batch_get("a", "p")["x"].tolist()) == ([{}], [7])


def test_a_value_that_is_put_again_must_be_the_same(client):
    client.kv_batch_put(["a"], "p", {"x": np.arange(1)})
    client.kv_batch_put(["a"], "p", {"x": np.arange(1)})
    with pytest.raises(CellConflict, match="clear it first"):
        client.kv_batch_put(["a"], "p", {"x": np.array([5])})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((["a"],), "needs fields or tags"),
        ((["a"], {"x": np.arange(2)}), "1 keys, but fields of {'x': 2} values"),
        ((["a", "a"], {"x": np.arange(2)}), "a key stands twice"),
        ((["a"], None, []), "0 tags for 1 keys"),
        ((["a"], {"x": [object()]}), "field 'x': .* plain values are kept"),
        ((["a"], None, [{"t": object()}]), "a tag holds plain values"),
        ((["a"], {"old": np.ones(1, np.float32)}), "float64 number, not float32 number"),
        ((["a"], {f"f{i}": np.ones(1) for i in range(60)}), "more than 58 fields"),
    ],
)
def test_what_does_not_fit_is_refused(client, arguments, message):
    client.kv_batch_put(["old"], "p", {"old": np.ones(1)})
    keys, *rest = arguments
    with pytest.raises(SchemaError, match=message):
        client.kv_batch_put(keys, "p", *rest)
    assert client.kv_list("p")["p"].get("a", {}) == {}


def test_each_task_gets_each_row_once(client):
    assert len(client.get_meta(["x", "y"], 2, "p", task_name="train")) == 0  # the consumer may come first
    client.kv_batch_put(list("abcd"), "p", {"x": np.arange(4), "z": ragged(1, 2, 3, 4)}, [{"n": n} for n in range(4)])
    client.kv_batch_put(list("bcd"), "p", {"y": np.arange(3)})
    meta = client.get_meta(["x", "y"], 2, "p", task_name="train")
    assert (meta.is_ready, meta.field_names, meta.partition_ids) == (True, ["x", "y"], ["p", "p"])
    assert meta.custom_meta == [{"n": 1}, {"n": 2}]
    assert client.get_data(meta)["x"].tolist() == [1, 2]
    assert client.get_data(pickle.loads(pickle.dumps(meta)))["y"].tolist() == [0, 1]
    assert client.get_data(meta.chunk(2)[1])["y"].tolist() == [1]
    assert client.get_meta(["x", "y"], 2, "p", task_name="train").size == 0
    assert client.get_data(client.get_meta(["x", "y"], 3, "p", task_name="other"))["x"].tolist() == [1, 2, 3]
    assert sorted(client.kv_list("p")["p"]) == list("abcd")


def test_looking_consumes_nothing(client):
    client.kv_batch_put(["a", "b"], "p", {"x": np.arange(2)})
    client.kv_batch_put(["b"], "p", {"y": np.arange(1)})
    for _ in range(2):
        meta = client.get_meta(["x", "y"], 0, "p", mode="force_fetch")
        assert (meta.size, meta.production_status.tolist(), meta.is_ready) == (2, [0, 1], False)
    assert client.get_data(meta.select_samples([1]))["y"].tolist() == [0]
    assert client.get_data(client.get_meta(["x"], 2, "p", task_name="t")).batch_size == (2,)


def test_a_handle_to_a_cleared_row_reads_nothing_else(client):
    client.kv_batch_put(["a"], "p", {"x": np.arange(1)})
    meta = client.get_meta(["x"], 1, "p", mode="force_fetch")
    client.kv_clear("a", "p")
    client.kv_batch_put(["b"], "p", {"x": np.arange(1)})
    with pytest.raises(RowGone):
        client.get_data(meta)


def test_two_clients_that_put_one_key_at_once_share_a_row(clients, pool):
    several = [Client(clients()) for _ in range(4)]
    keys = [str(number) for number in range(50)]
    puts = [pool.submit(each.kv_batch_put, keys, "p", {f"f{i}": np.arange(50)}) for i, each in enumerate(several)]
    for put in puts:
        put.result()
    assert sorted(several[0].kv_batch_get(keys, "p")) == ["f0", "f1", "f2", "f3"]
    assert len(several[1].kv_list("p")["p"]) == 50


def test_metas_split_and_join():
    meta = KVBatchMeta(list("abc"), [{"n": n} for n in range(3)], "p", ["x"])
    parts = meta.chunk(2)
    assert [part.keys for part in parts] == [["a", "b"], ["c"]]
    assert KVBatchMeta.concat(parts) == meta
    assert meta.select_keys(["c", "a"]).tags == [{"n": 2}, {"n": 0}]
    with pytest.raises(ValueError, match="twice"):
        KVBatchMeta(["a", "a"], [{}, {}])


PROGRAM = """
import sys
import numpy as np
from asyncflow.storage import kv as tq
tq.init(url=sys.argv[1])
tq.kv_batch_put(keys=["theirs"], partition_id="p", fields={"x": np.array([2])}, tags=[{"by": "child"}])
print(tq.kv_batch_get(keys=["mine"], partition_id="p", select_fields="x")["x"].tolist())
tq.close()
"""


def test_a_program_changes_its_import_only(address):
    kv.init({"controller": {"polling_mode": True}}, url=address)
    kv.init(url=address)
    kv.kv_batch_put(keys=["mine"], partition_id="p", fields={"x": np.array([1])})
    child = subprocess.run([sys.executable, "-c", PROGRAM, address], capture_output=True, text=True, check=True)
    assert child.stdout == "[1]\n"
    assert kv.kv_list(partition_id="p") == {"p": {"mine": {}, "theirs": {"by": "child"}}}
    meta = kv.get_meta(data_fields=["x"], batch_size=2, partition_id="p", mode="fetch", task_name="t")
    assert kv.get_data(metadata=meta)["x"].tolist() == [1, 2]
    assert kv.get_meta(data_fields=["x"], batch_size=2, partition_id="p", task_name="t").size == 0
    kv.kv_clear(keys=["mine", "theirs"], partition_id="p")
    kv.close()
    kv.close()
    with pytest.raises(StorageError, match="call init first"):
        kv.kv_list()


@pytest.mark.parametrize(
    ("name", "arguments"),
    {
        "kv_batch_put": ["keys", "partition_id", "fields", "tags", "data_parser"],
        "kv_batch_get": ["keys", "partition_id", "select_fields"],
        "kv_list": ["partition_id"],
        "kv_clear": ["keys", "partition_id"],
        "get_meta": ["data_fields", "batch_size", "partition_id", "mode", "task_name", "sampling_config"],
        "get_data": ["metadata"],
    }.items(),
)
def test_the_calls_have_the_arguments_of_the_public_package(name, arguments):
    assert list(inspect.signature(getattr(kv, name)).parameters) == arguments
    assert list(inspect.signature(getattr(Client, name)).parameters) == ["self", *arguments]


def test_a_fetch_that_may_wait_says_what_it_waited_for(queue, monkeypatch):
    monkeypatch.setattr(kv, "FETCH_SECONDS", 0.05)
    client = Client(queue)
    with pytest.raises(WaitTimeout, match=r"task 't'.* waited for 2 rows"):
        client.get_meta(["x"], 2, "p", task_name="t")
    with pytest.raises(StorageError, match="Table"):
        kv.init({"controller": {"sampler": "GRPOGroupNSampler"}})
