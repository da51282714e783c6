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

    def begin(self, version: Version) -> None:
        """Make room for a version; one that is not newer than all before it is refused (WeightsError)."""
        with self._lock:
            if self._closed:
                raise WeightsError(f"version {version} was to be published by a sender that is closed")
            if version <= self._last:
                what = f"version {version} was to be published after version {self._last}"
                raise WeightsError(f"{what}: versions only grow")
            dropped = [self._items.pop(old) for old in sorted(self._items)[: max(0, len(self._items) + 1 - self._keep)]]
        self._let_go(dropped)

    def put(self, version: Version, item: T) -> None:
        """Hold a version that was begun."""
        with self._lock:
            self._last = version
            if not self._closed:
                self._items[version] = item
                return
        self._drop(item)

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
