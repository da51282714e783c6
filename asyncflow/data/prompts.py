"""The table of prompts: what a run asks, ready as text and as token ids."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeGuard

import numpy as np

from asyncflow.config.model import Data
from asyncflow.data.sources import text
from asyncflow.data.template import Template, plain
from asyncflow.errors import DataError
from asyncflow.storage.batch import Batch, ColumnData
from asyncflow.storage.schema import Schema
from asyncflow.types import Int64s

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SCHEMA = Schema(
    {
        "source": "string",
        "prompt_id": "int64",
        "prompt_text": "string",
        "prompt_tokens": "list<int64>",
        "answer_text": "string",
        "item": "string",
    }
)
"""`prompt_id` is the item's index in its source, `item` its JSON."""

_STREAM = 0x5917  # keeps the split apart from other draws from the same seed


@dataclass(frozen=True, slots=True)
class Prompts:
    """Prompts as columns (see SCHEMA), in the order of the source."""

    batch: Batch
    dropped: int = 0
    """Items that were left out because their prompt is longer than `data.max_prompt_tokens`."""

    def __len__(self) -> int:
        return len(self.batch)

    def take(self, indices: Int64s | Sequence[int]) -> Batch:
        """Return the rows of these indices."""
        return self.batch.take(indices)

    def split(self, rows: int, seed: int) -> tuple["Prompts", "Prompts"]:
        """Hold out `rows` different prompts, and keep for training only what has none of their texts."""
        texts = self.batch["prompt_text"].strings()
        first = {prompt: index for index, prompt in reversed(list(enumerate(texts)))}
        distinct = np.sort(np.fromiter(first.values(), dtype=np.int64, count=len(first)))
        if rows >= len(distinct):
            have = f"{len(distinct)} different prompts among {len(self)}"
            raise DataError(f"{rows} held-out prompts leave none to train on: there are {have}")
        held = np.sort(np.random.default_rng((_STREAM, seed)).permutation(distinct)[:rows])
        banned = {texts[index] for index in held}
        kept = np.array([index for index, prompt in enumerate(texts) if prompt not in banned], dtype=np.int64)
        return Prompts(self.batch.take(kept), self.dropped), Prompts(self.batch.take(held))


def prompts(
    items: Sequence[Mapping[str, Any]], tokenizer: "PreTrainedTokenizerBase", data: Data, source_name: str = "data"
) -> Prompts:
    """Fill in the templates and tokenise; DataError names the item that is unusable, and why."""
    texts, tokens = _tokenised(items, tokenizer, Template(data.prompt), source_name)
    lengths = np.fromiter(map(len, tokens), dtype=np.int64, count=len(tokens))
    if (empty := np.flatnonzero(lengths == 0)).size:
        raise DataError(f"{_where(source_name, int(empty[0]))}: the prompt has no tokens")
    long = np.flatnonzero(lengths > data.max_prompt_tokens)
    if long.size and (data.on_long == "error" or long.size == len(items)):
        raise DataError(_too_long(long, lengths, data, source_name))
    kept = np.flatnonzero(lengths <= data.max_prompt_tokens).tolist()
    answers = _answers(items, data, source_name)
    columns: dict[str, ColumnData] = {
        "source": [source_name] * len(kept),
        "prompt_id": np.array(kept, dtype=np.int64),
        "prompt_text": [texts[index] for index in kept],
        "prompt_tokens": [np.asarray(tokens[index], dtype=np.int64) for index in kept],
        "answer_text": [answers[index] for index in kept],
        "item": [text(items[index]) for index in kept],
    }
    return Prompts(Batch.of(SCHEMA, columns), int(long.size))


def _where(source_name: str, index: int) -> str:
    return f"item {index} of {source_name}"


def _too_long(long: Int64s, lengths: Int64s, data: Data, source_name: str) -> str:
    worst = int(long[lengths[long].argmax()])
    return (
        f"{_where(source_name, int(long[0]))}: the prompt has {lengths[long[0]]} tokens, more than "
        f"data.max_prompt_tokens {data.max_prompt_tokens} ({long.size} of {len(lengths)} are longer, the longest has "
        f"{lengths[worst]}): "
        "raise it, or leave such items out with `on_long: drop`"
    )


def _tokenised(
    items: Sequence[Mapping[str, Any]], tokenizer: "PreTrainedTokenizerBase", template: Template, source_name: str
) -> tuple[list[str], list[list[int]]]:
    texts: list[str] = []
    chats: list[bool] = []
    for index, item in enumerate(items):
        value = template.value(item, _where(source_name, index))
        chats.append(_is_chat(value))
        texts.append(_chat_text(value, tokenizer, _where(source_name, index)) if _is_chat(value) else plain(value))
    tokens: list[list[int]] = [[]] * len(texts)
    for chat in (False, True):  # a chat template writes the special tokens itself
        chosen = [index for index, is_chat in enumerate(chats) if is_chat == chat]
        if chosen:
            encoded = tokenizer([texts[index] for index in chosen], add_special_tokens=not chat)["input_ids"]
            for index, row in zip(chosen, encoded, strict=True):
                tokens[index] = row
    return texts, tokens


def _is_chat(value: Any) -> TypeGuard[list[dict[str, Any]]]:
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(message, Mapping) and "role" in message and "content" in message for message in value)
    )


def _chat_text(messages: list[dict[str, Any]], tokenizer: "PreTrainedTokenizerBase", where: str) -> str:
    if not tokenizer.chat_template:
        raise DataError(f"{where} is a chat, but the tokenizer has no chat template: give `data.prompt` a text field")
    return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))


def _answers(items: Sequence[Mapping[str, Any]], data: Data, source_name: str) -> list[str]:
    template = Template(data.answer)
    optional = "answer" not in data.model_fields_set or data.answer == type(data).model_fields["answer"].default
    return [
        "" if optional and item.get("answer") is None else template.render(item, _where(source_name, index))
        for index, item in enumerate(items)
    ]
