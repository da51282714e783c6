"""What every training engine must do; an adapter joins by adding its factory to ENGINES."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from asyncflow.algorithms.aggregate import denominators
from asyncflow.algorithms.loss import SftLoss, policy_loss
from asyncflow.algorithms.options import reads, resolve
from asyncflow.algorithms.report import combine, metrics
from asyncflow.backends.infer.transformers import TransformersEngine
from asyncflow.backends.models import new_model
from asyncflow.backends.train.torch import TorchEngine
from asyncflow.errors import CheckpointError, DataError
from tests.backends.tiny import OPTIM, SPEC, answer, batch, naive_logprobs, prompts, requests, weights

ENGINES = {
    "torch": partial(TorchEngine, options={}),
    "torch-packed": partial(TorchEngine, options={"packing": True}),
}
OPTIONS = resolve("grpo", {})
COLUMNS = reads(OPTIONS)


@pytest.fixture(params=ENGINES)
def factory(request):
    return ENGINES[request.param]


@pytest.fixture
def make(factory):
    made = []

    def build(model=SPEC, temperature=1.0, optim=OPTIM):
        made.append(factory(model, optim=optim, temperature=temperature))
        return made[-1]

    yield build
    for engine in made:
        engine.close()


def step(engine, rows, budget=1000, loss=None, lr=0.01, options=OPTIONS):
    counted = denominators(rows["response_mask"].values, rows["response_mask"].offsets)
    loss = loss or policy_loss(options, counted, max_response_tokens=8)
    reports = [engine.forward_backward(part, loss) for part in engine.micro_batches(rows, budget, COLUMNS)]
    numbers = {name: value for name, value in combine(reports).items() if name != "spread"}
    return numbers, engine.optim_step(lr)


def exported(engine):
    return dict(engine.export_weights())


def same(first, second):
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_are_those_of_a_naive_unpadded_pass(make, temperature):
    engine, rows, model = make(temperature=temperature), batch(9, empty=True), new_model(SPEC)
    for part in engine.micro_batches(rows, 60, []):
        found = engine.logprobs(part)
        assert found.shape == part.mask.shape
        assert found.isfinite().all()
        for place, row in enumerate(part.rows):
            prompt, response = rows["prompt_tokens"][row], rows["response_tokens"][row]
            expected = naive_logprobs(model, prompt, response, temperature)
            np.testing.assert_allclose(found[place, : len(response)], expected, atol=1e-5)


@pytest.mark.parametrize("aggregate", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm"])
def test_micro_batches_do_not_change_the_step(make, aggregate):
    rows, options = batch(12, empty=True), {**OPTIONS, "aggregate": aggregate}
    (whole, one), (split, many) = (
        step(engine, rows, budget, options=options, lr=0.0) for engine, budget in ((make(), 1000), (make(), 18))
    )
    assert split == pytest.approx(whole, rel=1e-4, abs=1e-5)
    assert many.grad_norm == pytest.approx(one.grad_norm, rel=1e-4)


def test_weights_after_a_step_do_not_depend_on_the_micro_batches_or_the_order_of_rows(make):
    rows, optim = batch(12), replace(OPTIM, eps=1e-2)  # so that a rounded zero does not become a whole step
    shuffled = np.random.default_rng(0).permutation(12)
    engines = [make(optim=optim) for _ in range(3)]
    step(engines[0], rows)
    step(engines[1], rows, budget=18)
    step(engines[2], rows.take(shuffled), budget=40)
    first, *others = map(exported, engines)
    for other in others:
        assert all(torch.allclose(first[name], other[name], atol=1e-5) for name in first)


def test_the_order_of_rows_changes_not_even_the_rounding(make):
    rows, ids = batch(12), np.arange(100, 112)
    shuffled = np.random.default_rng(0).permutation(12)
    engine = make()
    parts = list(engine.micro_batches(rows, 40, COLUMNS, ids))
    again = list(engine.micro_batches(rows.take(shuffled), 40, COLUMNS, ids[shuffled]))
    assert [p.rows.tolist() for p in parts] == [p.rows.tolist() for p in again]
    assert all(torch.equal(p.tokens, q.tokens) for p, q in zip(parts, again, strict=True))


@pytest.mark.parametrize("budget", [16, 30, 100])
def test_the_token_budget_is_hard_and_no_row_is_lost(make, budget):
    rows = batch(30, empty=True)
    parts = list(make().micro_batches(rows, budget, COLUMNS))
    assert all(int(part.attention.sum()) <= budget for part in parts)
    assert sorted(row for part in parts for row in part.rows.tolist()) == list(range(30))


def test_micro_batches_hold_what_the_rows_hold(make):
    rows = batch(10, empty=True)
    for part in make().micro_batches(rows, 50, COLUMNS):
        width = part.mask.shape[1]
        for place, row in enumerate(part.rows.tolist()):
            prompt, response = rows["prompt_tokens"][row], rows["response_tokens"][row]
            tokens = part.tokens[place][part.attention[place] == 1]
            assert tokens.tolist() == [*prompt, *response]
            assert part.tokens[place, -width:][: len(response)].tolist() == response.tolist() or not width
            trained = part.mask[place, : len(response)].tolist()
            assert trained == rows["response_mask"][row].tolist()
            assert part.columns["advantage"][place] == float(rows["advantage"].array[row])
            assert part.columns["rollout_logprobs"].shape == part.mask.shape


def test_an_over_long_row_is_named(make):
    rows = batch(3)
    with pytest.raises(DataError, match=r"row 52 has \d+ prompt and \d+ response tokens.*token budget of 3"):
        make().micro_batches(rows.take([0, 1, 2]), 3, [], np.array([52, 53, 54]))


def test_columns_are_as_long_as_the_response(make):
    rows = batch(3)
    short = [cell[:-1] if row == 1 else cell for row, cell in enumerate(rows["response_mask"])]
    with pytest.raises(DataError, match=r"row 1 has .* response_mask"):
        make().micro_batches(rows.with_columns({"response_mask": short}), 100, [])


def test_an_empty_prompt_is_refused(make):
    rows = batch(2)
    with pytest.raises(DataError, match="row 1 has an empty prompt"):
        make().micro_batches(rows.with_columns({"prompt_tokens": [np.array([3]), np.array([], np.int64)]}), 100, [])


def test_a_step_counts_versions_clips_and_learns(make):
    engine, rows = make(), batch(8)
    loss = SftLoss(denominators(rows["response_mask"].values, rows["response_mask"].offsets))
    losses = []
    for version in range(1, 6):
        report, done = step(engine, rows, loss=loss)
        assert (done.version, engine.version, done.lr) == (version, version, 0.01)
        losses.append(report["loss"])
    assert losses == sorted(losses, reverse=True)


def test_gradients_are_clipped_to_the_global_norm(make):
    rows, free = batch(8), replace(OPTIM, max_grad_norm=1e9, weight_decay=0.0)
    engines = make(optim=free), make(optim=replace(free, max_grad_norm=1e-3))
    norms = [step(engine, rows)[1].grad_norm for engine in engines]
    assert norms[0] == pytest.approx(norms[1])
    assert norms[0] > 1e-3


def test_decay_is_on_matrices_only(make):
    engine = make(optim=replace(OPTIM, weight_decay=0.5))
    before = exported(engine)
    rows = batch(4, advantage=np.zeros(4, np.float32))
    step(engine, rows, lr=0.1)
    after = exported(engine)
    for name, tensor in before.items():
        expected = tensor * 0.95 if tensor.ndim == 2 else tensor
        assert torch.allclose(after[name], expected), name


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_changes_nothing(make, value):
    engine, rows = make(), batch(6)
    step(engine, rows)
    before, state = exported(engine), engine.state()
    with pytest.raises(FloatingPointError, match="not finite"):
        step(engine, rows.with_columns({"advantage": np.full(6, value, np.float32)}))
    assert engine.version == 1
    assert same(before, exported(engine))
    step(engine, rows)
    other = make()
    step(other, rows)
    other.load_state(state)
    step(other, rows)
    assert same(exported(engine), exported(other))


def test_a_restored_engine_goes_on_bit_for_bit(make, tmp_path):
    engine, rows = make(), batch(8)
    for _ in range(2):
        step(engine, rows)
    engine.snapshot()(tmp_path)
    state = engine.state()
    for _ in range(2):
        step(engine, rows)
    restored = make(replace(SPEC, path=str(tmp_path), config=None))
    restored.load_state(state)
    assert restored.version == 2
    for _ in range(2):
        step(restored, rows)
    assert same(exported(engine), exported(restored))


def test_a_state_that_does_not_fit_is_refused(make):
    engine = make()
    with pytest.raises(CheckpointError, match="lacks optimizer"):
        engine.load_state({"version": 1, "rng": torch.get_rng_state()})
    with pytest.raises(CheckpointError, match="does not fit"):
        engine.load_state({**engine.state(), "optimizer": {"state": {}, "param_groups": []}})


def test_exported_weights_are_every_tensor_and_copies(make):
    engine, rows = make(), batch(4)
    before, expected = exported(engine), dict(weights())
    assert same(before, expected)
    assert "lm_head.weight" in before
    step(engine, rows)
    assert same(before, expected)
    assert not any(tensor.requires_grad for tensor in before.values())


def test_transformers_reads_what_was_saved(make, tmp_path):
    engine = make()
    step(engine, batch(4))
    engine.snapshot()(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert same(dict(model.state_dict()), exported(engine))
    assert model.config.eos_token_id == 1


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_ratio_is_one_at_zero_lag(make, temperature):
    engine = make(temperature=temperature)
    step(engine, batch(6))
    rollout = TransformersEngine(SPEC, max_inflight=8, options={})
    rollout.stage_weights(1, engine.export_weights())
    rollout.apply_weights(1)
    asked = requests(prompts(12), temperature=temperature, top_p=0.95, stop_tokens=(4,))
    found = answer(rollout, asked)
    completions = [found[request.key] for request in asked]
    rows = batch(
        12,
        prompt_tokens=[request.prompt for request in asked],
        response_tokens=[c.tokens for c in completions],
        rollout_logprobs=[c.logprobs for c in completions],
        response_mask=[np.ones(len(c.tokens), np.uint8) for c in completions],
    )
    report, _ = step(engine, rows, budget=64)
    measured = metrics(report)
    assert measured["logprob_gap_max"] < 1e-4
    assert measured["ratio_mean"] == pytest.approx(1, abs=1e-5)
    assert measured["clip_share"] == 0
    assert measured["entropy"] > 0


def test_entropy_is_that_of_the_whole_vocabulary(make):
    engine, rows, seen = make(temperature=0.7), batch(4), []

    def loss(scored, part):
        seen.append((scored.entropy, part))
        return scored.entropy.sum(), {}

    for part in engine.micro_batches(rows, 1000, []):
        engine.forward_backward(part, loss, entropy=True)
    entropy, part = seen[0]
    model, row = new_model(SPEC), int(part.rows[0])
    prompt = torch.from_numpy(rows["prompt_tokens"][row].copy())[None]
    chances = torch.softmax(model(input_ids=prompt).logits[0, -1] / 0.7, 0)
    assert float(entropy[0, 0].detach()) == pytest.approx(float(-(chances * chances.log()).sum().detach()), rel=1e-4)
    assert engine.optim_step(0.0).grad_norm > 0


def test_sleep_gives_gradients_back_and_never_loses_them(make):
    engine, rows = make(), batch(4)
    step(engine, rows)
    engine.sleep()
    engine.wake()
    step(engine, rows)
    (part,) = engine.micro_batches(rows, 1000, COLUMNS)
    engine.forward_backward(part, SftLoss(denominators(part.mask)))
    with pytest.raises(RuntimeError, match="would lose gradients"):
        engine.sleep()


def test_a_step_of_empty_responses_is_harmless(make):
    engine = make()
    empty = [np.array([], np.int64)] * 3
    rows = batch(3, response_tokens=empty, response_mask=[np.array([], np.uint8)] * 3,
                 rollout_logprobs=[np.array([], np.float32)] * 3)  # fmt: skip
    report, done = step(engine, rows)
    assert (report["loss"], done.grad_norm, engine.version) == (0, 0, 1)


def test_bfloat16_trains_float32_weights(make):
    engine, rows = make(replace(SPEC, dtype="bfloat16")), batch(6)
    assert {tensor.dtype for tensor in exported(engine).values()} == {torch.bfloat16}
    loss = SftLoss(denominators(rows["response_mask"].values, rows["response_mask"].offsets))
    losses = [step(engine, rows, loss=loss, lr=1e-2)[0]["loss"] for _ in range(4)]
    assert losses[-1] < losses[0]


def test_a_snapshot_is_of_its_moment_whatever_is_trained_before_it_is_written(make, tmp_path):
    engine = make()
    before = exported(engine)
    write, state = engine.snapshot(), engine.state()
    step(engine, batch(6))
    write(tmp_path)
    again = make(replace(SPEC, path=str(tmp_path), config=None))
    again.load_state(state)
    assert same(exported(again), before)
    assert not same(exported(engine), before)
    assert again.version == 0
