import pytest
import torch

from asyncflow.backends.train.torch import TorchEngine
from tests.backends.tiny import OPTIM, batch, spec


def kept(**options):
    """Return how many bytes a forward pass keeps for the backward pass, and the weights after a step."""
    engine = TorchEngine(spec(num_hidden_layers=6), optim=OPTIM, temperature=1.0, options=options)
    sizes = []

    def keep(tensor):
        sizes.append(tensor.numel() * tensor.element_size())
        return tensor

    (part,) = engine.micro_batches(batch(8), 1000, [])
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        engine.forward_backward(part, lambda scored, part: (-(scored.logprobs * part.mask).sum(), {}))
    engine.optim_step(0.01)
    return sum(sizes), dict(engine.export_weights())


@pytest.mark.parametrize("packing", [False, True])
def test_layers_are_computed_again_and_give_the_same(packing):
    much, expected = kept(packing=packing)
    little, found = kept(packing=packing, gradient_checkpointing=True)
    assert little < much / 2
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
