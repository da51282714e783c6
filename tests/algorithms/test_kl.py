import pytest
import torch

from asyncflow.algorithms.kl import KL, unbiased


@pytest.mark.parametrize("name", ["k1", "k3"])
def test_in_expectation_the_unbiased_estimate_and_its_gradient_are_those_of_the_divergence(name):
    generator = torch.Generator().manual_seed(0)
    logits, other, reference = torch.randn(3, 1, 6, dtype=torch.float64, generator=generator)
    logits.requires_grad_()
    logprobs, behaviour, ref = (values.log_softmax(-1) for values in (logits, other, reference))
    every = torch.ones(1, 6)
    estimate = unbiased(KL[name](logprobs, ref, every), logprobs, behaviour, every)
    expectation = (behaviour.exp() * estimate).sum()
    divergence = (logprobs.exp() * (logprobs - ref)).sum()
    assert float(expectation.detach()) == pytest.approx(float(divergence.detach()))
    found, expected = (torch.autograd.grad(value, logits, retain_graph=True)[0] for value in (expectation, divergence))
    assert torch.allclose(found, expected, atol=1e-12)


@pytest.mark.parametrize("name", KL)
def test_the_unbiased_form_is_the_estimate_times_the_ratio(name):
    new, behaviour, ref = torch.tensor([[[0.5, 0.2]], [[0.25, 0.4]], [[0.1, 0.3]]], dtype=torch.float64).log()
    trained = torch.tensor([[1, 1]])
    estimate = KL[name](new, ref, trained)
    expected = [value * ratio for value, ratio in zip(estimate[0].tolist(), [2.0, 0.5], strict=True)]
    assert unbiased(estimate, new, behaviour, trained)[0].tolist() == pytest.approx(expected)
