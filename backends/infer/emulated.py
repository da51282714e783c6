"""An inference engine that takes the time that a cost model says, and makes up the tokens.

All running requests advance together, at a pace that follows from how many they are; between two events nothing is
computed. Versions, order and bounds are those of a real engine.
"""

import heapq
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from asyncflow.backends.base import Capacity, Completion, FinishReason, ModelSpec, Request
from asyncflow.backends.costs import InferCosts
from asyncflow.errors import DataError, QueueClosed, WeightsError
from asyncflow.types import Version

if TYPE_CHECKING:
    import torch

_TOKENS = range(2, 16)
"""Tokens that responses are made of."""


@dataclass(slots=True)
class _Running:
    request: Request
    begun: float
    """Tokens that each running request had advanced by when this one began."""
    length: int


class EmulatedEngine:
    """An `InferEngine`; its options are the fields of `InferCosts`."""

    def __init__(self, model: ModelSpec, *, max_inflight: int, options: Mapping[str, object]) -> None:
        self._costs, self._max_inflight = InferCosts.of(options), max_inflight
        self._waiting: deque[Request] = deque()
        self._running: dict[int, _Running] = {}
        self._ends: list[tuple[float, int]] = []
        self._known: set[int] = set()
        self._done: dict[int, Completion] = {}
        self._spans: list[tuple[float, Version]] = []
        """From which advance on which version was in use."""
        self._staged: Version | None = None
        self._advance = 0.0
        self._since = time.monotonic()
        self._stalls = 0.0
        """Seconds in which nothing advances: prefills and switches that are still under way."""
        self._paused = self._asleep = self._closed = False
        self._draining = 0
        """Calls that wait until nothing runs."""
        self._turn = threading.Condition()

    @property
    def version(self) -> Version | None:
        """Version of the weights in use; None before the first `apply_weights`."""
        return self._spans[-1][1] if self._spans else None

    @property
    def capacity(self) -> Capacity:
        """How many requests run and wait now."""
        with self._now():
            begins = not (self._draining or self._paused or self._asleep)
            return Capacity(len(self._running), len(self._waiting), self._max_inflight, begins)

    def submit(self, requests: Sequence[Request]) -> None:
        """Queue requests, all or none; DataError names the key of one that cannot be answered."""
        with self._now():
            known = set(self._known)
            for request in requests:
                if not len(request.prompt) or request.sampling.max_tokens < 1:
                    raise DataError(f"request {request.key} has an empty prompt, or asks for no token")
                if request.key in known:
                    raise DataError(f"request {request.key} was submitted already")
                known.add(request.key)
            self._known = known
            self._waiting.extend(requests)
            self._begin()

    def results(self, keys: Sequence[int]) -> Iterator[list[Completion]]:
        """Yield completions as they finish; several threads may each wait for keys of their own."""
        wanted = set(keys)
        while wanted:
            ready = self._next(wanted)
            wanted.difference_update(completion.key for completion in ready)
            yield ready

    def _next(self, wanted: set[int]) -> list[Completion]:
        with self._turn:
            while True:
                self._catch_up()
                ready = [key for key in self._done if key in wanted]
                if ready:
                    self._known.difference_update(ready)
                    return [self._done.pop(key) for key in ready]
                if not wanted <= self._known:
                    raise DataError(f"request {min(wanted - self._known)} was not submitted, or was yielded already")
                if not self._spans:
                    raise WeightsError("no weights were applied yet")
                self._turn.wait(self._until_next())

    def abort(self, keys: Sequence[int]) -> None:
        """End requests early with what they have; others than those in flight are passed over."""
        with self._now():
            for key in set(keys):
                if key in self._running:
                    self._finish(key, "abort")
            for request in [each for each in self._waiting if each.key in keys]:
                self._waiting.remove(request)
                self._done[request.key] = self._completion(_Running(request, self._advance, 0), 0, "abort")
            self._begin()

    def pause(self) -> None:
        """Stop; requests keep their tokens."""
        with self._now():
            self._paused = True

    def resume(self) -> None:
        """Go on after `pause`."""
        with self._now():
            self._paused = False

    def stage_weights(self, version: Version, tensors: Iterable[tuple[str, "torch.Tensor"]]) -> None:
        """Take every tensor, and keep none."""
        for _ in tensors:
            pass
        with self._now():
            if self.version is not None and version < self.version:
                raise WeightsError(f"version {version} is older than version {self.version}, which is in use")
            self._staged = version

    def apply_weights(self, version: Version, *, drain: bool = False, recompute: bool = False) -> Version:
        """Switch to what is staged; what runs keeps its tokens, or with `drain` ends before."""
        with self._now():
            if version == self.version:
                return version
            if self._staged is None or self._staged < version:
                raise WeightsError(f"version {version} cannot be applied: {self._staged} is staged")
            self._draining += int(drain)
            try:
                while drain and self._running:
                    self._turn.wait(self._until_next())
                    self._catch_up()
            finally:
                self._draining -= int(drain)
            if self._staged is not None:
                self._spans.append((self._advance, self._staged))
                self._staged = None
            self._stalls += self._costs.apply
            if recompute:
                held = sum(len(each.request.prompt) + self._advance - each.begun for each in self._running.values())
                self._stalls += self._costs.prefill * held
            self._begin()
            return self._spans[-1][1]

    def sleep(self) -> None:
        """Stop; what runs keeps its place."""
        with self._now():
            self._asleep = True

    def wake(self) -> None:
        """Undo `sleep`."""
        with self._now():
            self._asleep = False

    def close(self) -> None:
        """Free everything; idempotent. Pending `results` end with QueueClosed."""
        with self._turn:
            self._closed = True
            self._turn.notify_all()

    @contextmanager
    def _now(self) -> Iterator[None]:
        """Hold the lock when all that is due has happened, and let those who wait see what changed."""
        with self._turn:
            self._catch_up()
            yield
            self._turn.notify_all()

    def _pace(self) -> float:
        """Real seconds for one token of each running request."""
        return self._costs.scale * (self._costs.decode + self._costs.request * len(self._running))

    def _until_next(self) -> float | None:
        """Real seconds until a request ends, if nothing changes; None: for ever."""
        if self._paused or self._asleep or not self._ends:
            return None
        return self._stalls * self._costs.scale + (self._ends[0][0] - self._advance) * self._pace()

    def _catch_up(self) -> None:
        """Let happen what was due since the last look, one end after another: each changes the pace."""
        if self._closed:
            raise QueueClosed("the inference engine was closed")
        now = time.monotonic()
        while (due := self._until_next()) is not None and self._since + due <= now:
            self._since, self._stalls = self._since + due, 0.0
            self._advance = self._ends[0][0]
            while self._ends and self._ends[0][0] <= self._advance:
                self._finish(self._ends[0][1], None)
            self._begin()
        spent, self._since = now - self._since, now
        if self._paused or self._asleep:
            return
        stall = min(spent, self._stalls * self._costs.scale)
        self._stalls -= stall / (self._costs.scale or 1.0)
        pace = self._pace()
        if self._running and pace:
            self._advance += (spent - stall) / pace

    def _begin(self) -> None:
        while self._spans and not self._draining and self._waiting and len(self._running) < self._max_inflight:
            request = self._waiting.popleft()
            length = min(int(self._costs.lengths.draw(np.array([request.seed]))[0]), request.sampling.max_tokens)
            self._running[request.key] = _Running(request, self._advance, length)
            heapq.heappush(self._ends, (self._advance + length, request.key))
            self._stalls += self._costs.prefill * len(request.prompt)

    def _finish(self, key: int, finish: FinishReason | None) -> None:
        running = self._running.pop(key)
        self._ends = [(end, other) for end, other in self._ends if other != key]
        heapq.heapify(self._ends)
        count = running.length if finish is None else int(self._advance - running.begun)
        natural: FinishReason = "length" if running.length == running.request.sampling.max_tokens else "stop"
        self._done[key] = self._completion(running, count, finish or natural)
        self._turn.notify_all()

    def _completion(self, running: _Running, count: int, finish: FinishReason) -> Completion:
        request = running.request
        tokens = np.random.default_rng(request.seed & (2**63 - 1)).integers(_TOKENS.start, _TOKENS.stop, count)
        stops = request.sampling.stop_tokens
        if finish == "stop" and stops:
            tokens[-1] = stops[0]
        drawn = running.begun + np.arange(count)
        starts = np.array([start for start, _ in self._spans])
        versions = np.array([version for _, version in self._spans], np.int32)
        found = versions[np.searchsorted(starts, drawn, side="right") - 1] if count else np.empty(0, np.int32)
        return Completion(request.key, tokens, np.full(count, -1.0, np.float32), found, finish)
