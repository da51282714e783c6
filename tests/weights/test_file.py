import pytest
import torch

from asyncflow.errors import WeightsError
from asyncflow.weights import FileChannel


def tensors():
    shared = torch.randn(4, 3)
    return {
        "embed.weight": shared,
        "head.weight": shared,
        "norm": torch.ones(3, dtype=torch.bfloat16),
        "empty": torch.empty(0, 2),
    }


def test_weights_arrive_bit_for_bit_tied_ones_included(tmp_path):
    sent = tensors()
    FileChannel(tmp_path).publish(3, sent.items())
    got = dict(FileChannel(tmp_path).load(3))
    assert got.keys() == sent.keys()
    for name, tensor in sent.items():
        assert got[name].dtype == tensor.dtype
        assert torch.equal(got[name], tensor)


def test_versions_only_grow(tmp_path):
    channel = FileChannel(tmp_path)
    channel.publish(3, tensors().items())
    with pytest.raises(WeightsError, match="version 3 was to be published after version 3"):
        channel.publish(3, tensors().items())


def test_a_version_that_was_not_published_is_named(tmp_path):
    with pytest.raises(WeightsError, match="version 9 is not published"):
        list(FileChannel(tmp_path).load(9))


@pytest.mark.parametrize("damage", ["flip", "cut", "foreign"])
def test_a_damaged_file_is_refused_before_anything_is_applied(tmp_path, damage):
    FileChannel(tmp_path).publish(1, tensors().items())
    (path,) = tmp_path.iterdir()
    data = bytearray(path.read_bytes())
    if damage == "flip":
        data[-1] ^= 1
    elif damage == "cut":
        data = data[:-5]
    else:
        data = b"not a safetensors file"
    path.write_bytes(data)
    with pytest.raises(WeightsError):
        next(FileChannel(tmp_path).load(1))


def test_retiring_deletes_and_may_be_repeated(tmp_path):
    channel = FileChannel(tmp_path)
    channel.publish(1, tensors().items())
    channel.retire(1)
    channel.retire(1)
    assert list(tmp_path.iterdir()) == []
