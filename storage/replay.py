"""The sampler `replay`: new rows, and beside them rows that were done before, within bounds.

A batch of n is made of new rows in row order and at most `share` × n rows drawn by a seeded generator from those
that may be used again: done fewer than `uses` times, and at most `max_age` versions older than the newest version
seen. There is no batch without a new row, so the end of the new rows is the end of the stream. A row is over with
when it has been used up or grown too old; then it may retire.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from asyncflow.storage.image import ReplayImage
from asyncflow.storage.rolling import Rolling
from asyncflow.storage.sampler import DONE, READY, Fifo, Picked, Statuses, Wish
from asyncflow.storage.spec import Choice
from asyncflow.types import Float64s, Int64s

_NONE = np.empty(0, np.int64)
_NOWHERE = -1


class Pool:
    """Distinct rows without order, from which some are drawn at a constant cost for each."""

    def __init__(self, base: int) -> None:
        self._rows: Int64s = np.empty(64, np.int64)
        self._place = Rolling(np.int64, _NOWHERE, base)
        self._count = 0

    def __len__(self) -> int:
        return self._count

    @property
    def rows(self) -> Int64s:
        """All of them."""
        return self._rows[: self._count].copy()

    def grow(self, count: int) -> None:
        """Make room for rows with higher numbers."""
        self._place.grow(count)

    def forget(self, row: int) -> None:
        """Hear that rows below this one are gone, and in here no longer."""
        self._place.forget(row)

    def has(self, rows: Int64s) -> npt.NDArray[np.bool_]:
        """Return which rows are in here."""
        found = rows >= self._place.base
        found[found] = self._place.at(rows[found]) != _NOWHERE
        return found

    def add(self, rows: Int64s) -> None:
        """Add rows that are not in here."""
        stop = self._count + len(rows)
        if stop > len(self._rows):
            self._rows = np.append(self._rows[: self._count], np.empty(stop + 64, np.int64))
        self._rows[self._count : stop] = rows
        self._place.put(rows, np.arange(self._count, stop))
        self._count = stop

    def remove(self, rows: Int64s) -> None:
        """Remove rows that are in here: the last ones take their places."""
        holes = self._place.at(rows)
        self._place.put(rows, _NOWHERE)
        left = self._count - len(rows)
        last = self._rows[left : self._count]
        movers = last[self._place.at(last) != _NOWHERE]
        holes = holes[holes < left]
        self._rows[holes] = movers
        self._place.put(movers, holes)
        self._count = left

    def draw(self, count: int, random: np.random.Generator) -> Int64s:
        """Return so many distinct rows by chance."""
        if 2 * count > self._count:
            return self._rows[random.permutation(self._count)[:count]]
        places = _NONE
        while len(places) < count:
            more = np.append(places, random.integers(0, self._count, 2 * count))
            places = more[np.sort(np.unique(more, return_index=True)[1])]
        return self._rows[places[:count]]


class Replay:
    """New rows, and rows that were used before."""

    def __init__(self, base: int, choice: Choice, version: Callable[[Int64s], Float64s]) -> None:
        self._choice, self._version = choice, version
        self._new = Fifo(base)
        self._pool = Pool(base)
        self._uses = Rolling(np.int32, base=base)
        self._last = Rolling(np.int64, _NOWHERE, base)  # the step of the last use
        self._random = np.random.default_rng(choice.seed)
        self._newest = -np.inf
        self._by_version: dict[float, list[Int64s]] = {}
        self._noted = 0
        self._over: list[Int64s] = []

    def accepts(self, wish: Wish) -> bool:
        """Rows, never groups."""
        return self._new.accepts(wish)

    def admitted(self, count: int, slots: Int64s) -> None:
        """Make room."""
        self._new.admitted(count, slots)
        self._pool.grow(count)
        for column in (self._uses, self._last):
            column.grow(count)

    def moved(self, rows: Int64s, slots: Int64s, before: Statuses, after: int) -> None:
        """Follow new rows, and keep or leave those that were done."""
        self._new.moved(rows, slots, before, after)
        if after == READY and self._choice.version and len(rows):
            self._see(self._version(rows))
        self._pool.remove(rows[self._pool.has(rows)])
        if after == DONE:
            self._uses.put(rows, self._uses.at(rows) + 1)
            again = self._may(rows)
            self._over.append(rows[~again])
            self._keep(rows[again])

    def _see(self, versions: Float64s) -> None:
        """Note the newest version, and let go what is too old beside it."""
        known = versions[np.isfinite(versions)]
        self._newest = max(self._newest, float(known.max(initial=-np.inf)))
        if self._choice.max_age is None:
            return
        for version in [each for each in self._by_version if each < self._newest - self._choice.max_age]:
            for rows in self._by_version.pop(version):
                # A row that was used again stands here once for each time.
                old = np.unique(rows[self._pool.has(rows)])
                self._pool.remove(old)
                self._over.append(old)

    def _may(self, rows: Int64s) -> npt.NDArray[np.bool_]:
        """Return which rows may be used again."""
        again = self._uses.at(rows) < self._choice.uses
        if self._choice.max_age is not None:
            again &= self._version(rows) >= self._newest - self._choice.max_age
        return again

    def _keep(self, rows: Int64s) -> None:
        self._pool.add(rows)
        if self._choice.max_age is None or len(rows) == 0:
            return
        self._noted += len(rows)
        if self._noted > 2 * len(self._pool) + 1024:
            # Rows that have gone, or were drawn, still stand here: begin again with those that are left.
            self._by_version, rows, self._noted = {}, self._pool.rows, len(self._pool)
        versions = self._version(rows)
        for version in np.unique(versions).tolist():
            self._by_version.setdefault(version, []).append(rows[versions == version])

    def forget(self, row: int, slot: int) -> None:
        """Trim to the rows that are left."""
        self._new.forget(row, slot)
        self._pool.forget(row)
        for column in (self._uses, self._last):
            column.forget(row)

    def kept(self, wish: Wish) -> int:
        """Nothing is kept."""
        return 0

    def restart(self) -> None:
        """Nothing is planned."""

    def pick(self, wish: Wish, short: bool) -> Picked | None:
        """Return new rows and, up to their share, rows that were used before."""
        again = 0 if wish.rows is None else min(len(self._pool), int(wish.rows * self._choice.share))
        wanted = None if wish.rows is None else wish.rows - again
        new = self._new.pick(Wish(rows=wanted), short)
        if new is None:
            return None
        if wanted is None:
            again = min(len(self._pool), int(len(new.rows) * self._choice.share / (1 - self._choice.share)))
        return Picked(np.append(new.rows, self._pool.draw(again, self._random)))

    # What the ledger asks

    def used(self, rows: Int64s, step: int) -> int:
        """Note the step that used rows; return how many of them were used for the first time."""
        self._last.put(rows, step)
        return int(np.count_nonzero(self._uses.at(rows) == 1))

    def over(self) -> Int64s:
        """Return the rows that are over with since the last call, some of which may be gone."""
        rows, self._over = self._over, []
        return np.concatenate(rows) if rows else _NONE

    def over_by(self, rows: Int64s, statuses: Statuses, step: int) -> npt.NDArray[np.bool_]:
        """Return which rows are over with, and were used last in a step up to this one."""
        over: npt.NDArray[np.bool_] = (statuses == DONE) & ~self._pool.has(rows)
        return over & (self._last.at(rows) <= step)

    def unused(self, rows: Int64s) -> int:
        """Take back one use for each time that a row is named; return how many rows have none left."""
        self._uses.add(rows, -1)
        return int(np.count_nonzero(self._uses.at(np.unique(rows)) == 0))

    def end(self) -> None:
        """Hear that no new row will come: nothing is used again."""
        self._over.append(self._pool.rows)
        self._pool.remove(self._pool.rows)

    @property
    def again(self) -> Int64s:
        """The rows that may be used again."""
        return self._pool.rows

    def anew(self, rows: Int64s) -> int:
        """Forget all uses of rows; return how many of them had been used."""
        used = int(np.count_nonzero(self._uses.at(rows)))
        self._uses.put(rows, 0)
        self._last.put(rows, _NOWHERE)
        return used

    # What a snapshot keeps

    def image(self) -> ReplayImage:
        """Return what is known of uses, and where the generator stands."""
        return ReplayImage(
            self._uses.copy(),
            self._last.copy(),
            self._pool.rows,
            self._newest,
            [(version, np.concatenate(rows)) for version, rows in self._by_version.items()],
            self._noted,
            np.concatenate([*self._over, _NONE]),
            _state(self._random),
        )

    def load(self, image: ReplayImage) -> None:
        """Know what an image says; the statuses of the rows have been told."""
        base, count = self._uses.base, self._uses.stop - self._uses.base
        self._pool = Pool(base)
        self._pool.grow(count)
        self._pool.add(image.pool)
        self._uses.put(np.arange(base, base + count), image.uses)
        self._last.put(np.arange(base, base + count), image.last)
        self._newest, self._noted, self._over = image.newest, image.noted, [image.over]
        self._by_version = {version: [rows] for version, rows in image.by_version}
        self._random = _generator(image.random)


def _state(random: np.random.Generator) -> tuple[bytes, bytes, int, int]:
    """Return the state of a PCG64: two numbers of 128 bits, and a half that is left of the last draw."""
    state = random.bit_generator.state
    inner = state["state"]
    numbers = (inner["state"].to_bytes(16, "little"), inner["inc"].to_bytes(16, "little"))
    return *numbers, state["has_uint32"], state["uinteger"]


def _generator(state: tuple[bytes, bytes, int, int]) -> np.random.Generator:
    bits = np.random.PCG64(0)
    number, increment, has, half = state
    inner = {"state": int.from_bytes(number, "little"), "inc": int.from_bytes(increment, "little")}
    whole: Any = {"bit_generator": "PCG64", "state": inner, "has_uint32": has, "uinteger": half}
    bits.state = whole
    return np.random.Generator(bits)
