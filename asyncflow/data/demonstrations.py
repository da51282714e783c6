"""Answers that supervised training, or a warm-up, learns from: drawn from templates over the items."""

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from asyncflow.data.order import Order
from asyncflow.data.template import Template
from asyncflow.data.tokenizer import answer_tokens
from asyncflow.errors import DataError
from asyncflow.seeds import mix
from asyncflow.storage.batch import Batch

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_STREAM = 0xDE30  # keeps these draws apart from others that are made from the same seed


class Demonstrations:
    """Draws supervised examples: prompts in epochs, for each one of the templates at random."""

    def __init__(
        self,
        prompts: Batch,
        templates: Sequence[str] | None,
        tokenizer: "PreTrainedTokenizerBase",
        seed: int,
        shuffle: bool = True,
    ) -> None:
        """Render and tokenise; without templates the answers are those of the prompts. DataError if one is empty."""
        variants = [prompts] if templates is None else [_answered(prompts, template) for template in templates]
        self._examples = Batch.concat([_examples(variant, tokenizer) for variant in variants])
        self._prompts, self._variants, self._seed, self._drawn = len(prompts), len(variants), seed, 0
        self._order = Order(len(prompts), seed, shuffle)

    def take(self, count: int) -> Batch:
        """Draw the next examples: identity columns, `prompt_tokens`, `response_tokens`, `response_mask`."""
        draws = np.arange(self._drawn, self._drawn + count, dtype=np.int64)
        self._drawn += count
        variant = mix(_STREAM, self._seed, draws) % self._variants
        return self._examples.take(variant * self._prompts + self._order.take(count))


def _answered(prompts: Batch, template: str) -> Batch:
    fill = Template(template)
    items = (json.loads(item) for item in prompts["item"].strings())
    texts = [fill.render(item, f"item {index}") for index, item in enumerate(items)]
    return prompts.with_columns({"answer_text": texts})


def _examples(prompts: Batch, tokenizer: "PreTrainedTokenizerBase") -> Batch:
    empty = [index for index, text in enumerate(prompts["answer_text"].strings()) if not text]
    if empty:
        raise DataError(f"item {prompts['prompt_id'].array[empty[0]]} has no answer to train on: set data.answer")
    answers = answer_tokens(prompts, tokenizer)
    mask = [np.ones(len(answer), dtype=np.uint8) for answer in answers]
    kept = prompts.select(("source", "prompt_id", "prompt_tokens"))
    return kept.with_columns({"response_tokens": answers, "response_mask": mask})
