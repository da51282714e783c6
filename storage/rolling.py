"""Flat arrays over ids that only grow: appended at the end, forgotten from the front.

An id may have several values, all of one kind: then the array has a second axis.

Growing and forgetting cost a constant per id on average, so nothing grows with the ids that have gone.
"""

from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt

from asyncflow.types import Int64s

T = TypeVar("T", bound=np.generic)

_LEAST = 1024


class Rolling(Generic[T]):
    """An array indexed by id; holds ids `base` to `stop`, with `width` values each if it is not 0."""

    __slots__ = ("_data", "_fill", "_first", "base", "stop")

    def __init__(self, dtype: type[T], fill: int = 0, base: int = 0, width: int = 0) -> None:
        self._data: npt.NDArray[T] = np.full((_LEAST, width) if width else _LEAST, fill, dtype)
        self._fill = fill
        self._first = base  # the id that stands at _data[0]
        self.base = self.stop = base

    def grow(self, count: int) -> None:
        """Append ids that hold the fill value."""
        needed = self.stop + count - self._first
        if needed > len(self._data):
            self._move(max(2 * (self.stop + count - self.base), _LEAST))
        self.stop += count

    def forget(self, until: int) -> None:
        """Let ids below `until` go."""
        self.base = max(self.base, until)
        if self.base - self._first > len(self._data) // 2:
            self._move(max(2 * (self.stop - self.base), _LEAST))

    def widen(self, width: int) -> None:
        """Give each id so many values; new ones hold the fill value."""
        data = np.full((len(self._data), width), self._fill, self._data.dtype)
        data[:, : self._data.shape[1]] = self._data
        self._data = data

    def _move(self, capacity: int) -> None:
        data = np.full((capacity, *self._data.shape[1:]), self._fill, self._data.dtype)
        data[: self.stop - self.base] = self.span(self.base, self.stop)
        self._data, self._first = data, self.base

    def copy(self) -> npt.NDArray[T]:
        """Return the values of all ids that are held."""
        return self.span(self.base, self.stop).copy()

    def load(self, values: npt.NDArray[T], base: int) -> None:
        """Hold these values for ids from `base`; there must be no ids yet."""
        self.base = self.stop = self._first = base
        self.grow(len(values))
        self.span(base, self.stop)[:] = values

    def span(self, start: int, stop: int) -> npt.NDArray[T]:
        """Return a writable view of ids start to stop."""
        return self._data[start - self._first : stop - self._first]

    def first_other(self, value: int, limit: int) -> int:
        """Return the first id from base up to `limit` that does not hold `value`, or `limit`."""
        start = self.base
        if start < limit and self._data[start - self._first] != value:
            return start
        while start < limit:
            found = np.flatnonzero(self.span(start, min(start + 4096, limit)) != value)
            if len(found):
                return start + int(found[0])
            start += 4096
        return max(limit, self.base)

    def at(self, ids: Int64s) -> npt.NDArray[T]:
        """Return the values of some ids, all between base and stop."""
        return self._data[ids - self._first]

    def put(self, ids: Int64s, values: "npt.NDArray[T] | int") -> None:
        """Set the values of some ids."""
        self._data[ids - self._first] = values

    def add(self, ids: Int64s, amount: "npt.NDArray[T] | int") -> None:
        """Add to the values of some ids; an id that is named twice gets both."""
        np.add.at(self._data, ids - self._first, amount)

    def raise_to(self, ids: Int64s, values: npt.NDArray[T]) -> None:
        """Raise the values of some ids to at least these."""
        np.maximum.at(self._data, ids - self._first, values)
