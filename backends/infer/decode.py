"""The requests that are being answered: arrays with an entry for each row, beside one cache of keys and values.

All rows advance by one token at a time. A row occupies columns `pad … length` of the cache, without a gap, so its
mask and positions follow from `pad`. Nothing here loops over rows except where one begins or ends.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from transformers import Cache, PreTrainedModel

from asyncflow.backends.base import Completion, FinishReason, Request
from asyncflow.backends.infer.cache import join, joinable, new_cache, select
from asyncflow.backends.infer.sampling import Knobs, draw, uniforms
from asyncflow.backends.models import cache_keyword
from asyncflow.types import Int64s, Version

_COMPACT = 0.8
"""Rows that have ended leave the cache when at most this share of it is alive: copying it costs about a step."""

Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Rows:
    """One entry for each row; the arrays of `tokens`, `logprobs` and `versions` are filled up to `count`."""

    key: Int64s
    seed: npt.NDArray[np.uint64]
    temperature: npt.NDArray[np.float32]
    top_p: npt.NDArray[np.float64]
    top_k: Int64s
    stops: Int64s
    """Stop tokens (B, S), filled up with -1."""
    budget: Int64s
    pad: Int64s
    """Columns of the cache before the row's first."""
    prompt: Int64s
    """Prompts (B, P), filled up to `asked`."""
    asked: Int64s
    count: Int64s
    tokens: Int64s
    logprobs: npt.NDArray[np.float32]
    versions: npt.NDArray[np.int32]
    alive: Bools

    def take(self, rows: npt.NDArray[Any]) -> "Rows":
        return Rows(**{field.name: getattr(self, field.name)[rows] for field in fields(self)})

    def join(self, other: "Rows") -> "Rows":
        pairs = {field.name: (getattr(self, field.name), getattr(other, field.name)) for field in fields(self)}
        return Rows(**{name: _stack(name, mine, theirs) for name, (mine, theirs) in pairs.items()})

    @property
    def knobs(self) -> Knobs:
        return Knobs(self.temperature, self.top_p, self.top_k)

    def completion(self, row: int, finish: FinishReason | None = None) -> Completion:
        """Return what a row has; by default it ended at a stop token or its budget."""
        count = int(self.count[row])
        tokens = self.tokens[row, :count].copy()
        stopped = count > 0 and tokens[-1] in self.stops[row]
        return Completion(
            key=int(self.key[row]),
            tokens=tokens,
            logprobs=self.logprobs[row, :count].copy(),
            versions=self.versions[row, :count].copy(),
            finish=finish or ("stop" if stopped else "length"),
        )


class Running:
    """Rows in flight on one model; not thread-safe."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model, self._keyword = model, cache_keyword(model)
        self._sdpa = model.config._attn_implementation == "sdpa"
        self._rows: Rows | None = None
        self._cache: Cache | None = None
        self._outdated = False

    def __len__(self) -> int:
        return 0 if self._rows is None else int(self._rows.alive.sum())

    @property
    def joins(self) -> bool:
        """Whether rows can begin while others run."""
        return self._cache is None or joinable(self._cache)

    def begin(self, requests: Sequence[Request], limit: int, version: Version) -> list[Completion]:
        """Read the prompts, each distinct one once, and draw the first token of each request."""
        self._refresh()
        prompts, prompt_of = _distinct(requests)
        rows = _rows(requests, limit)
        tokens, pad = _flush_right(prompts)
        cache = new_cache(self._model.config, room=0)
        logits = self._forward(tokens, pad, tokens.shape[1], cache)
        room = int(rows.budget.max())
        select(cache, torch.from_numpy(prompt_of).to(logits.device), 0, room)
        begun = replace(rows, pad=pad[prompt_of])
        done = self._draw(begun, logits[torch.from_numpy(prompt_of).to(logits.device)], version)
        self._append(begun, cache)
        return done

    def step(self, version: Version) -> list[Completion]:
        """Draw the next token of each row."""
        self._refresh()
        self._compact()
        rows, cache = self._rows, self._cache
        if rows is None or cache is None:
            return []
        last = rows.tokens[np.arange(len(rows.key)), rows.count - 1]
        logits = self._forward(last[:, None], rows.pad, _length(cache) + 1, cache)
        return self._draw(rows, logits, version)

    def outdate(self) -> None:
        """Compute the keys and values of all rows anew, by the weights that are there then, before the next token."""
        self._outdated = True

    def abort(self, keys: set[int]) -> list[Completion]:
        """End rows with what they have."""
        rows = self._rows
        if rows is None or not keys:
            return []
        ended = [row for row in np.flatnonzero(rows.alive) if int(rows.key[row]) in keys]
        rows.alive[ended] = False
        return [rows.completion(int(row), "abort") for row in ended]

    def _forward(self, tokens: Int64s, pad: Int64s, length: int, cache: Cache) -> Tensor:
        """Read tokens (B, n) that end at column `length` of the cache; return the logits after the last (B, V)."""
        device = self._model.device
        columns = np.arange(length)
        positions = np.maximum(columns[-tokens.shape[1] :] - pad[:, None], 0)
        mask = torch.from_numpy(columns >= pad[:, None]).to(device) if pad.any() else None
        if mask is not None and tokens.shape[1] == 1 and joinable(cache) and self._sdpa:
            mask = mask[:, None, None, :]  # what the model would make of it, at a cost
        output = self._model(
            input_ids=torch.from_numpy(tokens).to(device),
            attention_mask=mask,
            position_ids=torch.from_numpy(positions).to(device),
            use_cache=True,
            logits_to_keep=1,
            **{self._keyword: cache},
        )
        return output.logits[:, -1]  # type: ignore[no-any-return]

    def _draw(self, rows: Rows, logits: Tensor, version: Version) -> list[Completion]:
        drawn, logs = draw(logits, rows.knobs, uniforms(rows.seed, rows.count))
        tokens = drawn.cpu().numpy()
        alive = np.flatnonzero(rows.alive)
        place = rows.count[alive]
        rows.tokens[alive, place] = tokens[alive]
        rows.logprobs[alive, place] = logs.cpu().numpy()[alive]
        rows.versions[alive, place] = version
        rows.count[alive] += 1
        ended = (rows.stops == tokens[:, None]).any(axis=1) | (rows.count >= rows.budget)
        over = np.flatnonzero(ended & rows.alive)
        rows.alive[over] = False
        return [rows.completion(row) for row in over.tolist()]

    def _append(self, rows: Rows, cache: Cache) -> None:
        self._compact()
        if self._rows is None or self._cache is None:
            self._rows, self._cache = rows, cache
            return
        mine, theirs = _length(self._cache), _length(cache)
        join(self._cache, cache)
        older = replace(self._rows, pad=self._rows.pad + max(0, theirs - mine))
        self._rows = older.join(replace(rows, pad=rows.pad + max(0, mine - theirs)))

    def _refresh(self) -> None:
        """Read what the rows hold in one pass, if their keys and values are outdated; the last token is not read yet.

        The old cache is let go before the new one is made, and rows that have ended leave.
        """
        rows, outdated = self._rows, self._outdated
        self._outdated = False
        if rows is None or not outdated:
            return
        kept = rows.take(np.flatnonzero(rows.alive))
        self._rows = self._cache = None
        if not len(kept.key):
            return
        each = zip(kept.prompt, kept.asked, kept.tokens, kept.count, strict=True)
        tokens, pad = _flush_right([np.concatenate([p[:asked], t[: count - 1]]) for p, asked, t, count in each])
        cache = new_cache(self._model.config, room=int((kept.budget - kept.count).max()))
        self._forward(tokens, pad, tokens.shape[1], cache)
        self._rows, self._cache = replace(kept, pad=pad), cache

    def _compact(self) -> None:
        """Let rows that have ended leave, when they are enough of them."""
        if self._rows is None or self._cache is None:
            return
        rows, alive = self._rows, np.flatnonzero(self._rows.alive)
        if len(alive) == 0:
            self._rows = self._cache = None
        elif len(alive) <= _COMPACT * len(rows.key):
            kept = rows.take(alive)
            skip = int(kept.pad.min()) if joinable(self._cache) else 0
            room = int((kept.budget - kept.count).max())
            select(self._cache, torch.from_numpy(alive).to(self._model.device), skip, room)
            self._rows = replace(kept, pad=kept.pad - skip)


def _rows(requests: Sequence[Request], limit: int) -> Rows:
    sampling = [request.sampling for request in requests]
    budget = np.array([min(s.max_tokens, limit - len(r.prompt)) for s, r in zip(sampling, requests, strict=True)])
    size, wide = len(requests), max(len(s.stop_tokens) for s in sampling)
    asked = np.array([len(request.prompt) for request in requests])
    prompts = np.zeros((size, asked.max()), np.int64)
    for row, request in enumerate(requests):
        prompts[row, : asked[row]] = request.prompt
    stops = np.array([[*s.stop_tokens, *[-1] * (wide - len(s.stop_tokens))] for s in sampling], np.int64)
    return Rows(
        key=np.array([request.key for request in requests], np.int64),
        seed=np.array([request.seed & (2**64 - 1) for request in requests], np.uint64),
        temperature=np.array([s.temperature for s in sampling], np.float32),
        top_p=np.array([s.top_p for s in sampling], np.float64),
        top_k=np.array([s.top_k for s in sampling], np.int64),
        stops=stops.reshape(size, wide),
        budget=budget,
        pad=np.zeros(size, np.int64),
        prompt=prompts,
        asked=asked,
        count=np.zeros(size, np.int64),
        tokens=np.zeros((size, budget.max()), np.int64),
        logprobs=np.zeros((size, budget.max()), np.float32),
        versions=np.zeros((size, budget.max()), np.int32),
        alive=np.ones(size, np.bool_),
    )


def _distinct(requests: Sequence[Request]) -> tuple[list[Int64s], Int64s]:
    """Return the distinct prompts, and for each request the place of its own."""
    places: dict[bytes, int] = {}
    prompts: list[Int64s] = []
    prompt_of = np.empty(len(requests), np.int64)
    for row, request in enumerate(requests):
        prompt = np.asarray(request.prompt, np.int64)
        prompt_of[row] = places.setdefault(prompt.tobytes(), len(places))
        if prompt_of[row] == len(prompts):
            prompts.append(prompt)
    return prompts, prompt_of


def _flush_right(sequences: Sequence[Int64s]) -> tuple[Int64s, Int64s]:
    """Return sequences as one array (B, L), and how many columns are before the first of each (B,)."""
    width = max(map(len, sequences))
    pad = np.array([width - len(sequence) for sequence in sequences])
    tokens = np.zeros((len(sequences), width), np.int64)
    for row, sequence in enumerate(sequences):
        tokens[row, pad[row] :] = sequence
    return tokens, pad


def _length(cache: Cache) -> int:
    return int(cache.get_seq_length())


def _stack(name: str, mine: npt.NDArray[Any], theirs: npt.NDArray[Any]) -> npt.NDArray[Any]:
    if mine.ndim == 1:
        return np.concatenate([mine, theirs])
    wide, fill = max(mine.shape[1], theirs.shape[1]), -1 if name == "stops" else 0
    return np.concatenate([np.pad(a, ((0, 0), (0, wide - a.shape[1])), constant_values=fill) for a in (mine, theirs)])
