"""Value heads against a naive pass without padding, in float64 unless said otherwise."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from asyncflow.algorithms.aggregate import UNDIVIDED, denominators
from asyncflow.algorithms.loss import ValueLoss
from asyncflow.algorithms.report import combine, divided, metrics
from asyncflow.backends.base import OptimSpec
from asyncflow.backends.models import new_model
from asyncflow.backends.train.torch import TorchEngine
from asyncflow.backends.train.value import HEAD, value_model
from asyncflow.errors import ConfigError
from tests.backends.test_packed import SHAPES
from tests.backends.tiny import SPEC, batch

PLAIN = OptimSpec(max_grad_norm=1e9)
VALUE = replace(SPEC, head="value", dtype="float64")
READS = ("values", "returns")
CLIP = 0.3


def engine(spec=VALUE, optim=PLAIN, **options):
    return TorchEngine(spec, optim=optim, temperature=0.7, options=options)


def valued(rows, seed=0, **columns):
    """Rows with values of before and returns."""
    rng, made = np.random.default_rng(seed), batch(rows, seed, empty=True)
    lengths = made["response_tokens"].lengths.tolist()
    before, returns = ([rng.standard_normal(n).astype(np.float32) for n in lengths] for _ in READS)
    return made.with_columns({"values": before, "returns": returns, **columns})


def step(own, rows, budget=1000, lr=0.01, clip=CLIP):
    """Make a step; return its metrics and its report."""
    loss = ValueLoss(UNDIVIDED, clip)
    reports = [own.forward_backward(part, loss) for part in own.micro_batches(rows, budget, READS)]
    share = denominators(rows["response_mask"].to_padded()[0]).share("token-mean")
    return metrics(divided(combine(reports), share)), own.optim_step(lr, share)


def values(own, rows, budget=1000):
    """Value of each token, row after row."""
    found = {}
    for part in own.micro_batches(rows, budget, ()):
        for row, each in zip(part.rows.tolist(), own.values(part), strict=True):
            found[row] = each[: len(rows["response_tokens"][row])]
    return torch.cat([found[row] for row in range(len(rows))])


def exported(own):
    return dict(own.export_weights())


@pytest.fixture
def folder(tmp_path):
    """Write a critic of one shape, whose head is not zero, and return the model and its folder."""

    def write(shape="qwen2"):
        spec = replace(VALUE, config=SHAPES[shape])
        model = value_model(spec, torch.float64)
        torch.nn.init.normal_(model.head.weight, std=0.1, generator=torch.Generator().manual_seed(0))
        torch.nn.init.constant_(model.head.bias, 0.5)
        model.save_pretrained(tmp_path, model.state_dict())
        return model, replace(spec, path=str(tmp_path), config=None)

    return write


def naive(model, prompt, response):
    """Values before each response token, by a pass of this row alone."""
    ids = torch.from_numpy(np.concatenate([prompt, response]))[None]
    return model.head(model.body(input_ids=ids).last_hidden_state)[0, len(prompt) - 1 : -1, 0]


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("shape", ["qwen2", "gpt2", "windows"])
def test_values_and_their_gradient_are_those_of_a_naive_pass(folder, shape, packing):
    model, spec = folder(shape)
    own, rows, total = engine(spec, packing=packing), valued(9), torch.zeros((), dtype=torch.float64)
    expected = []
    for row in range(len(rows)):
        found = naive(model, rows["prompt_tokens"][row], rows["response_tokens"][row])
        expected.append(found.detach())
        before, target, trained = (torch.from_numpy(rows[name][row].copy()) for name in (*READS, "response_mask"))
        bounded = torch.maximum(torch.minimum(found, before + CLIP), before - CLIP)
        total = total + (torch.maximum((found - target) ** 2, (bounded - target) ** 2) / 2 * trained).sum()
    tokens = int(rows["response_mask"].values.sum())
    (total / tokens).backward()
    torch.testing.assert_close(values(own, rows, 60), torch.cat(expected), rtol=1e-10, atol=1e-12)

    found, made = step(own, rows, budget=60, lr=0.0)
    assert found["value_loss"] == pytest.approx(float(total.detach()) / tokens)
    assert 0 < found["value_clip_share"] < 1
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    whole = torch.cat([gradient.flatten() for gradient in gradients.values()])
    assert made.grad_norm == pytest.approx(float(whole.norm()), rel=1e-4)
    # After one step, Adam's first moment is a tenth of the gradient; matrices come first.
    order = sorted(gradients, key=lambda name: gradients[name].ndim < 2)
    for number, name in enumerate(order):
        moment = own.state()["optimizer"]["state"][number]["exp_avg"]
        # Norms of qwen2 compute in float32, whatever the dtype.
        rtol, atol = (1e-9, 1e-12) if shape == "gpt2" else (1e-4, 1e-5)
        torch.testing.assert_close(moment * 10, gradients[name], rtol=rtol, atol=atol)


def test_a_new_critic_is_the_policy_with_values_of_zero():
    own, policy = exported(engine()), new_model(SPEC, torch.float64).base_model.state_dict()
    assert {name for name in own if not name.startswith("body.")} == {"head.weight", "head.bias"}
    assert all(torch.equal(own[f"body.{name}"], tensor) for name, tensor in policy.items())
    assert not values(engine(), valued(5)).any()


def test_any_language_model_can_become_a_critic(tmp_path):
    new_model(SPEC).save_pretrained(tmp_path)
    read = exported(engine(replace(VALUE, path=str(tmp_path), config=None)))
    assert all(torch.equal(read[name], tensor) for name, tensor in exported(engine()).items())


@pytest.mark.parametrize("packing", [False, True])
def test_a_constant_reward_is_learned(packing):
    constant = [np.full(n, 1.5, np.float32) for n in valued(12)["response_tokens"].lengths]
    own, rows = engine(packing=packing), valued(12, returns=constant)
    losses = [step(own, rows, budget=60, lr=0.01, clip=None)[0]["value_loss"] for _ in range(60)]
    assert losses[0] == pytest.approx(1.5**2 / 2)
    assert losses[-1] < 1e-3
    trained = torch.from_numpy(rows["response_mask"].values.copy()) != 0
    assert float((values(own, rows)[trained] - 1.5).abs().mean()) < 0.05


def test_micro_batches_and_the_order_of_rows_do_not_change_the_step(folder):
    _, spec = folder()
    rows = valued(12)
    engines = [engine(spec) for _ in range(3)]
    found = [
        step(own, mine, budget)[0]
        for own, mine, budget in zip(engines, (rows, rows, rows.take(np.arange(12)[::-1])), (1000, 18, 40), strict=True)
    ]
    for own, other in zip(engines[1:], found[1:], strict=True):
        assert other == pytest.approx(found[0])
        for name, tensor in exported(engines[0]).items():
            torch.testing.assert_close(exported(own)[name], tensor, rtol=1e-7, atol=1e-9)


def test_a_restored_critic_goes_on_bit_for_bit(tmp_path):
    own, rows = engine(), valued(8)
    for _ in range(2):
        step(own, rows)
    write, state = own.snapshot(), own.state()
    step(own, rows)
    write(tmp_path)
    restored = engine(replace(VALUE, path=str(tmp_path), config=None))
    restored.load_state(state)
    assert restored.version == 2
    step(restored, rows)
    first, second = exported(own), exported(restored)
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_a_head_of_another_model_is_refused(folder, tmp_path):
    _, spec = folder()
    file = tmp_path / HEAD
    file.write_bytes(file.read_bytes()[:20])
    with pytest.raises(ConfigError, match=f"{HEAD} is not the value head of the model beside it"):
        engine(spec)


def test_what_is_under_the_mask_never_counts():
    rows = valued(6)
    hidden = [each == 0 for each in rows["response_mask"]]
    dirty = {
        name: [np.where(here, np.float32(np.nan), each) for each, here in zip(rows[name], hidden, strict=True)]
        for name in READS
    }
    assert step(engine(), rows.with_columns(dirty))[0] == step(engine(), rows)[0]


def test_a_step_of_empty_responses_is_harmless():
    nothing = [np.array([], np.float32)] * 3
    rows = batch(3, response_tokens=[np.array([], np.int64)] * 3, response_mask=[np.array([], np.uint8)] * 3)
    found, made = step(engine(), rows.with_columns(dict.fromkeys(("rollout_logprobs", *READS), nothing)))
    assert (found["value_loss"], made.grad_norm, made.version) == (0, 0, 1)


def test_values_are_not_rounded_to_bfloat16(folder):
    _, spec = folder()
    found = values(engine(replace(spec, dtype="bfloat16")), valued(6))
    assert found.dtype == torch.float32
    assert not torch.equal(found, found.bfloat16().float())
