"""Divides items over ranks and micro-batches so that token sums are balanced: pure arithmetic.

Items (rows, or groups that stay together) are first divided over the ranks, then those of each rank over its
micro-batches. Both are the same greedy step: the largest item to the emptiest bin. What is left of the difference
between ranks is lowered by moving or exchanging single items.

Every rank has the same number of micro-batches, the smallest for which none exceeds the budget, except that an
item above the budget is one by itself. Those of a rank come largest first, so that ranks that step together
work on micro-batches of like size; where items do not suffice, the last ones are empty.
"""

import heapq

import numpy as np

from asyncflow.types import Int64s

_EXCHANGES = 32


def plan(weights: Int64s, ranks: int, budget: int) -> tuple[Int64s, int]:
    """Return the bin of each item and the micro-batches per rank, k: bin i belongs to rank i // k."""
    weights = np.maximum(weights, 1)
    rank = _even(weights, fill(weights, ranks), ranks)
    own = [np.flatnonzero(rank == each) for each in range(ranks)]
    count = max(1, *(_fewest(weights[items], budget) for items in own))
    while (bins := _packed(weights, own, count, budget)) is None:
        count += 1
    return bins, count


def fill(weights: Int64s, bins: int) -> Int64s:
    """Lay items into bins, the largest first, each into the emptiest; return the bin of each.

    Each choice depends on the one before. A heap takes a microsecond an item, and only for the items of one step;
    laying runs of like items at once was tried and is slower up to many thousands of them.
    """
    order = np.argsort(-weights, kind="stable")
    heap = [(0, each) for each in range(bins)]
    chosen = []
    for weight in weights[order].tolist():
        load, least = heap[0]
        chosen.append(least)
        heapq.heapreplace(heap, (load + weight, least))
    found = np.empty(len(weights), np.int64)
    found[order] = chosen
    return found


def _even(weights: Int64s, bins: Int64s, count: int) -> Int64s:
    """Move or exchange items between the fullest bin and the emptiest for as long as that helps."""
    for _ in range(_EXCHANGES if count > 1 else 0):
        loads = np.bincount(bins, weights, minlength=count)
        full, slack = int(loads.argmax()), int(loads.argmin())
        gap = loads[full] - loads[slack]
        give, take = np.flatnonzero(bins == full), np.flatnonzero(bins == slack)
        # An exchange with nothing is a move.
        take = take[np.argsort(weights[take], kind="stable")]
        theirs = np.append(0, weights[take])
        at = np.clip(np.searchsorted(theirs, weights[give] - gap / 2), 0, len(take))
        at = np.stack([at, np.maximum(at - 1, 0)])
        change = weights[give] - theirs[at]
        left = np.where((change > 0) & (change < gap), np.abs(gap - 2 * change), gap)
        side, best = np.unravel_index(int(left.argmin()), left.shape)
        if left[side, best] >= gap:
            break
        bins[give[best]] = slack
        if at[side, best]:
            bins[take[at[side, best] - 1]] = full
    return bins


def _fewest(weights: Int64s, budget: int) -> int:
    """Return the number of micro-batches below which items cannot fit."""
    large = weights > budget
    return int(np.count_nonzero(large)) - int(-weights[~large].sum() // budget)


def _packed(weights: Int64s, own: list[Int64s], count: int, budget: int) -> Int64s | None:
    """Return the bin of each item with `count` for each rank, or None if some would exceed the budget."""
    bins = np.empty(len(weights), np.int64)
    for rank, items in enumerate(own):
        chosen = fill(weights[items], count)
        loads = np.bincount(chosen, weights[items], minlength=count)
        if np.any((loads > budget) & (np.bincount(chosen, minlength=count) > 1)):
            return None
        place = np.empty(count, np.int64)
        place[np.argsort(-loads, kind="stable")] = np.arange(count)
        bins[items] = rank * count + place[chosen]
    return bins
