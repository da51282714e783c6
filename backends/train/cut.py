"""Rows cut into micro-batches under a hard budget of tokens: padded ones, or real ones where rows are packed.

Rows are ordered by length, then by row id, so that the cut does not depend on the order in which they arrived.
Prompts are padded on the left and responses on the right, so a micro-batch is as wide as its longest prompt and
its longest response together. Rows of about one length then stand together; packed ones need not, and are spread
evenly over as few micro-batches as hold them.
"""

import heapq
from collections.abc import Iterator, Sequence

import numpy as np
import torch

from asyncflow.backends.base import MicroBatch
from asyncflow.errors import DataError
from asyncflow.storage.batch import Batch
from asyncflow.storage.column import Column
from asyncflow.types import Int64s, RowIds


def cut(
    batch: Batch,
    token_budget: int,
    columns: Sequence[str],
    rows: RowIds | None = None,
    *,
    pad: int,
    device: torch.device,
    packed: bool = False,
) -> tuple[int, Iterator[MicroBatch]]:
    """Return how many micro-batches of at most `token_budget` tokens there are, and make them.

    Padding counts, unless the rows are to be `packed`: a micro-batch has the same form then, and real tokens count.
    Reads `prompt_tokens`, `response_tokens`, `response_mask` and `columns`; `rows` names the rows, by default
    0, 1, …. A row that is over-long, has no prompt, or whose columns differ from its response in length is a
    DataError, raised before the first micro-batch.
    """
    ids = np.arange(len(batch)) if rows is None else np.asarray(rows, np.int64)
    if len(ids) != len(batch):
        raise DataError(f"{len(ids)} row ids for {len(batch)} rows")
    prompts, responses = batch["prompt_tokens"].lengths, batch["response_tokens"].lengths
    _check(batch, ids, token_budget, columns)
    order = np.lexsort((ids, prompts, prompts + responses))[::-1]
    if packed:
        parts = [order[places] for places in _spread((prompts + responses)[order].tolist(), token_budget)]
    else:
        parts = [order[start:stop] for start, stop in _bounds(prompts[order], responses[order], token_budget)]
    return len(parts), (padded(batch.take(part), ids[part], columns, pad, device) for part in parts)


def _check(batch: Batch, ids: Int64s, token_budget: int, columns: Sequence[str]) -> None:
    prompts, responses = batch["prompt_tokens"].lengths, batch["response_tokens"].lengths
    for row in np.flatnonzero(prompts == 0)[:1]:
        raise DataError(f"row {ids[row]} has an empty prompt")
    for row in np.flatnonzero(prompts + responses > token_budget)[:1]:
        raise DataError(
            f"row {ids[row]} has {prompts[row]} prompt and {responses[row]} response tokens, together more than "
            f"the token budget of {token_budget}"
        )
    for name in ("response_mask", *columns):
        column = batch[name]
        if column.offsets is None:
            continue
        for row in np.flatnonzero(column.lengths != responses)[:1]:
            raise DataError(
                f"row {ids[row]} has {column.lengths[row]} values of {name} for {responses[row]} response tokens"
            )


def _bounds(prompts: Int64s, responses: Int64s, token_budget: int) -> Iterator[tuple[int, int]]:
    start = prompt = response = 0
    for row, (p, r) in enumerate(zip(prompts.tolist(), responses.tolist(), strict=True)):
        prompt, response = max(prompt, p), max(response, r)
        if (row - start + 1) * (prompt + response) > token_budget:
            yield start, row
            start, prompt, response = row, p, r
    if start < len(prompts):
        yield start, len(prompts)


def _spread(lengths: list[int], token_budget: int) -> list[list[int]]:
    """Give each length, longest first, to the part that has least, among as few parts as hold them all that way."""
    count = max(-(-sum(lengths) // token_budget), sum(length > token_budget // 2 for length in lengths))
    while (parts := _parts(lengths, token_budget, count)) is None:
        count += 1
    return parts


def _parts(lengths: list[int], token_budget: int, count: int) -> list[list[int]] | None:
    parts: list[list[int]] = [[] for _ in range(count)]
    held = [(0, part) for part in range(count)]
    for place, length in enumerate(lengths):
        tokens, part = held[0]
        if tokens + length > token_budget:
            return None
        heapq.heapreplace(held, (tokens + length, part))
        parts[part].append(place)
    return parts


def padded(batch: Batch, ids: RowIds, columns: Sequence[str], pad: int, device: torch.device) -> MicroBatch:
    """Make one micro-batch of rows."""
    prompts, prompt_mask = batch["prompt_tokens"].to_padded(fill=pad, left=True)
    responses, response_mask = batch["response_tokens"].to_padded(fill=pad)
    trained, _ = batch["response_mask"].to_padded()
    tokens = np.concatenate([prompts, responses], axis=1).astype(np.int64)
    attention = np.concatenate([prompt_mask, response_mask], axis=1).astype(np.int64)
    return MicroBatch(
        tokens=torch.from_numpy(tokens).to(device),
        attention=torch.from_numpy(attention).to(device),
        mask=torch.from_numpy((trained != 0).astype(np.float32)).to(device),
        columns={name: _tensor(batch[name]).to(device) for name in columns},
        rows=ids,
    )


def _tensor(column: Column) -> torch.Tensor:
    values = column.array.copy() if column.offsets is None else column.to_padded()[0]
    return torch.from_numpy(values.astype(np.float32) if values.dtype.kind == "f" else values)
