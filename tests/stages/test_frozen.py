"""What a model that is not trained says of each response token, against one naive pass over each row in float64."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from asyncflow.backends.models import new_model
from asyncflow.config.model import Data, Model, Pipeline, Reward, Rollout, Teacher, Warmup
from asyncflow.config.training import Train
from asyncflow.stage import Context
from asyncflow.stages.frozen import Frozen
from asyncflow.stages.reference import FOLDER, reference
from asyncflow.stages.teacher import teacher
from asyncflow.storage import Batch
from tests.backends.tiny import CONFIG, SPEC, batch, spec

TEMPERATURE = 0.6


def folder(path: Path, seed: int) -> Path:
    """Save a model whose weights follow from a seed."""
    new_model(spec(seed=seed)).save_pretrained(path)
    return path


def said(stage: Frozen, rows: Batch, path: Path, warmup: Warmup | None = None, **options: object) -> Batch:
    train = Train(token_budget=40, packing=options.pop("packing", False), distill_coef=1.0)
    config = Pipeline(
        model=Model(config=CONFIG, tokenizer="characters"), data=Data(source="python"),
        reward=Reward(fn="exact_match"), rollout=Rollout(temperature=TEMPERATURE), train=train, warmup=warmup,
        teacher=Teacher(path=str(path / "teacher")), seed=SPEC.seed, **options,
    )  # fmt: skip
    stage.setup(Context(config, "frozen-0", path, lambda event: None))
    columns = stage.process(rows)
    stage.close()
    return columns


def naive(model: torch.nn.Module, row: dict[str, object]) -> np.ndarray:
    prompt, response = (torch.from_numpy(row[name].copy()) for name in ("prompt_tokens", "response_tokens"))
    with torch.no_grad():
        logits = model(input_ids=torch.cat([prompt, response])[None]).logits[0, len(prompt) - 1 : -1]
    return torch.log_softmax(logits / TEMPERATURE, -1).gather(-1, response[:, None])[:, 0].numpy()


def check(columns: Batch, name: str, rows: Batch, path: Path | None) -> None:
    model = new_model(replace(SPEC, path=None if path is None else str(path)), torch.float64)
    (found,) = columns.items()
    assert found[0] == name
    assert found[1].lengths.tolist() == rows["response_tokens"].lengths.tolist()
    for position in range(len(rows)):
        row = {key: rows[key][position] for key in ("prompt_tokens", "response_tokens")}
        assert found[1][position] == pytest.approx(naive(model, row), abs=2e-5)


@pytest.fixture
def rows() -> Batch:
    """Rows of three groups, some without a response, in more than one micro-batch."""
    found = batch(9, seed=4, empty=True)
    assert 0 in found["response_tokens"].lengths
    return found.with_columns({"group_id": np.repeat([5, 2, 9], 3), "row": np.arange(9)})


@pytest.mark.parametrize("options", [{}, {"packing": True}, {"deterministic": True}])
def test_the_teacher_of_a_folder_says_what_a_naive_pass_says(tmp_path, rows, options):
    path = folder(tmp_path / "teacher", seed=11)
    check(said(teacher(), rows, tmp_path, **options), "teacher_logprobs", rows, path)


def test_the_reference_is_the_model_of_the_configuration_or_the_one_that_was_kept(tmp_path, rows):
    check(said(reference(), rows, tmp_path), "ref_logprobs", rows, None)
    kept = folder(tmp_path / FOLDER, seed=12)
    check(said(reference(), rows, tmp_path, Warmup(steps=1)), "ref_logprobs", rows, kept)


def test_a_model_that_comes_after_the_setup_is_read_with_the_first_batch(tmp_path, rows):
    class Waiting(Frozen):
        def setup(self, context: Context) -> None:
            super().setup(context)
            folder(tmp_path / FOLDER, seed=13)

    made = Waiting("ref_logprobs", reference()._model)
    check(said(made, rows, tmp_path, Warmup(steps=1)), "ref_logprobs", rows, tmp_path / FOLDER)
