"""The storage units of a controller: where each is, what it holds, and what it is told."""

import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from asyncflow.errors import StorageError
from asyncflow.storage.orders import (
    Free,
    Order,
    Orders,
    Spilled,
)
from asyncflow.storage.status import MemoryStatus
from asyncflow.storage.ticket import Answer

Recompute: TypeAlias = Callable[[str, Sequence[str]], Sequence[str]]
"""Which tasks must have a row of a table again when it has lost these columns; none if nobody can make them anew."""


def _nobody(table: str, columns: Sequence[str]) -> Sequence[str]:
    return ()


@dataclass(slots=True)
class Post:
    """A unit, as the controller knows it."""

    session: int
    url: str
    tell: Callable[..., None]
    size: int = 0
    """Bytes of the cells that it holds."""
    asked: int = 0
    """How often it was told to free rows, and how often it has."""
    freed: int = 0
    spilled: Spilled | None = None
    """What it said of its disk, if it has a limit of memory."""


class Units:
    """The storage units of one controller."""

    def __init__(self, recompute: "Recompute | None" = None, keys: str | os.PathLike[str] | None = None) -> None:
        """Without a `recompute`, rows of a unit that has died are dropped; `keys` are for units on other hosts."""
        self.keys = keys
        self.recompute: Recompute = recompute or _nobody
        self._posts: dict[int, Post] = {}
        self._turn = 0
        self._joined = threading.Condition()

    def wait(self, count: int, timeout: float) -> bool:
        """Wait until so many units have joined; return whether they have."""
        with self._joined:
            return self._joined.wait_for(lambda: len(self._posts) >= count, timeout)

    @property
    def urls(self) -> dict[int, str]:
        """Where each unit serves."""
        return {number: post.url for number, post in self._posts.items()}

    @property
    def sizes(self) -> dict[str, int]:
        """Bytes of the cells that each unit holds, by its address."""
        return {post.url: post.size for post in self._posts.values()}

    @property
    def memory(self) -> dict[str, MemoryStatus]:
        """Memory and disk of each unit that has a limit, by its address."""
        told = [(post, post.spilled) for post in self._posts.values() if post.spilled is not None]
        return {
            post.url: MemoryStatus(max(0, post.size - each.size), each.size, each.limit, each.folder, each.trouble)
            for post, each in told
        }

    def spilled(self, number: int, told: Spilled) -> None:
        """Hear what a unit has on its disk."""
        self._posts[number].spilled = told

    def attach(self, session: int, url: str, answer: Answer) -> None:
        """Take in the unit of a session."""
        number = next((each for each in range(1, 256) if each not in self._posts), None)
        if number is None or any(post.session == session for post in self._posts.values()):
            raise StorageError(f"unit {url} cannot join: a queue has at most 255 units, and a unit joins once")
        post = self._posts[number] = Post(session, url, lambda *orders: answer((Orders(list(orders)), None)))
        post.tell()
        with self._joined:
            self._joined.notify_all()

    def leave(self, session: int) -> int | None:
        """Hear that a session has ended; return the number of the unit that it was, if it was one."""
        for number, post in self._posts.items():
            if post.session == session:
                del self._posts[number]
                return number
        return None

    def number(self, session: int) -> int:
        """Return the number of the unit that a session is."""
        for number, post in self._posts.items():
            if post.session == session:
                return number
        raise StorageError("only a storage unit may say this")

    def tell(self, number: int, order: Order) -> None:
        """Give an order to a unit, if it lives."""
        if number in self._posts:
            self._posts[number].tell(order)

    def broadcast(self, order: Order) -> None:
        """Give an order to all units."""
        for post in self._posts.values():
            post.tell(order)

    def free(self, number: int, order: Free) -> None:
        """Have a unit free rows, if it lives."""
        if number in self._posts:
            self._posts[number].asked += 1
            self._posts[number].tell(order)

    def freed(self, number: int) -> None:
        """Hear that a unit has freed what it was told to next."""
        self._posts[number].freed += 1

    @property
    def marks(self) -> dict[int, int]:
        """How often each unit was told to free rows."""
        return {number: post.asked for number, post in self._posts.items()}

    def reached(self, marks: dict[int, int]) -> bool:
        """Whether every unit that lives has freed what it had been told to by then."""
        return all(self._posts[number].freed >= mark for number, mark in marks.items() if number in self._posts)

    def beyond(self, number: int, marks: dict[int, int]) -> bool:
        """Whether what a unit has freed last was told to it after these marks."""
        return self._posts[number].freed > marks.get(number, 0)

    def grew(self, number: int, size: int) -> None:
        """Hear that a unit holds more, or less."""
        if number in self._posts:
            self._posts[number].size += size

    def best(self, but: int = 0) -> int:
        """Return the unit that a put best goes to, or its copy: of those that hold least, each in turn; 0 for none."""
        posts = {number: post for number, post in self._posts.items() if number != but}
        if not posts:
            return 0
        self._turn += 1
        least = min(post.size for post in posts.values())
        lightest = [number for number, post in posts.items() if post.size == least]
        return lightest[self._turn % len(lightest)]
