"""The versions that a sender holds, oldest first: retired when nobody needs them, and never too many."""

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from asyncflow.errors import WeightsError
from asyncflow.types import Version

T = TypeVar("T")


class Shelf(Generic[T]):
    """Holds what belongs to each version; safe from many threads."""

    def __init__(self, keep: int, drop: Callable[[T], None] = lambda item: None) -> None:
        """`keep` is the most that are held; `drop` hears of each that is let go, in whichever thread does it."""
        self._keep, self._drop = keep, drop
        self._items: dict[Version, T] = {}
        self._last: Version = -1
        self._closed = False
        self._lock = threading.Lock()

    def check(self, version: Version) -> None:
        """Refuse a version that is not newer than all before it (WeightsError)."""
        if self._closed:
            raise WeightsError(f"version {version} was to be published by a sender that is closed")
        if version <= self._last:
            raise WeightsError(f"version {version} was to be published after version {self._last}: versions only grow")

    def put(self, version: Version, item: T) -> None:
        """Hold a version, and let the oldest go if there are too many."""
        with self._lock:
            self._items[version] = item
            self._last = version
            # One that was closed while it published has nothing to keep.
            gone = list(self._items) if self._closed else sorted(self._items)[: -self._keep]
            dropped = [self._items.pop(old) for old in gone]
        self._let_go(dropped)

    def get(self, version: Version) -> T | None:
        """Return what belongs to a version; None if it was let go."""
        with self._lock:
            return self._items.get(version)

    def retire(self, version: Version) -> None:
        """Let go of what is older than a version."""
        with self._lock:
            dropped = [self._items.pop(old) for old in sorted(self._items) if old < version]
        self._let_go(dropped)

    def close(self) -> None:
        """Let go of everything, and take nothing more; idempotent."""
        with self._lock:
            self._closed, dropped = True, list(self._items.values())
            self._items.clear()
        self._let_go(dropped)

    def _let_go(self, dropped: list[T]) -> None:
        for item in dropped:
            self._drop(item)


def gone(version: Version) -> WeightsError:
    """Return the error of a receiver that comes too late."""
    return WeightsError(f"version {version} is not there: it was withdrawn for newer ones, or the trainer has ended")
