"""The embedded inference engine: a Hugging Face model under a sampling loop of our own, with continuous batching.

The loop runs in whichever thread waits for results, one token for all rows at a time. Every other call takes
effect between two tokens: it waits for the token at hand, and the loop waits for it. Rows that run while weights
change keep their tokens, and their keys and values unless these are to be computed anew; each token carries the
version that drew it. Nothing but running rows has keys and values: no later request can meet old ones.
"""

import threading
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from asyncflow.backends.base import Capacity, Completion, ModelSpec, Request
from asyncflow.backends.infer.decode import Running
from asyncflow.backends.models import default_device, new_model, read_options
from asyncflow.errors import DataError, QueueClosed, WeightsError
from asyncflow.types import Version

_OPTIONS: Mapping[str, object] = {"device": None, "attention": "sdpa"}


class TransformersEngine:
    """An `InferEngine` in this process; options: `device`, `attention`.

    The same requests submitted in one call are answered with the same numbers in every run. Requests begin in
    the order of submission, as soon as a quarter of `max_inflight` is free.
    """

    def __init__(self, model: ModelSpec, *, max_inflight: int, options: Mapping[str, object]) -> None:
        chosen = read_options("transformers", options, _OPTIONS)
        self._device = torch.device(chosen["device"] or default_device())
        self._model: Any = new_model(model)
        self._prepare(chosen["attention"])
        self._limit = int(getattr(self._model.config, "max_position_embeddings", 2**31))
        self._max_inflight = max_inflight
        self._running = Running(self._model)
        self._waiting: deque[Request] = deque()
        self._known: set[int] = set()
        self._done: dict[int, Completion] = {}
        self._version: Version | None = None
        self._staged: tuple[Version, dict[str, Tensor]] | None = None
        # Guards all of the above. `_computing` is set while a token is computed, without the lock; `_guests` counts
        # the calls that want to come in between two tokens, so that the loop lets them.
        self._turn = threading.Condition()
        self._computing = False
        self._guests = 0
        # Calls that wait until nothing runs; nothing begins meanwhile.
        self._draining = 0
        self._paused = self._asleep = self._closed = False
        self._failure: BaseException | None = None

    def _prepare(self, attention: str) -> None:
        self._model.to(self._device).requires_grad_(False)
        self._model.set_attn_implementation(attention)

    @property
    def version(self) -> Version | None:
        """Version of the weights in use; None before the first `apply_weights`."""
        return self._version

    @property
    def capacity(self) -> Capacity:
        """How many requests run and wait, between two tokens."""
        with self._between():
            running = len(self._running)
            begins = not (self._draining or self._paused or self._asleep) and (not running or self._running.joins)
            return Capacity(running, len(self._waiting), self._max_inflight, begins)

    def submit(self, requests: Sequence[Request]) -> None:
        """Queue requests, all or none; DataError names the key of one that cannot be answered."""
        with self._turn:
            self._check_open()
            keys = self._known.copy()
            for request in requests:
                self._check(request)
                if request.key in keys:
                    raise DataError(f"request {request.key} was submitted already")
                keys.add(request.key)
            self._known = keys
            self._waiting.extend(requests)
            self._turn.notify_all()

    def results(self, keys: Sequence[int]) -> Iterator[list[Completion]]:
        """Yield completions as they finish; several threads may each wait for keys of their own."""
        wanted = set(keys)
        while wanted:
            ready = self._next(wanted)
            wanted.difference_update(completion.key for completion in ready)
            yield ready

    def abort(self, keys: Sequence[int]) -> None:
        """End requests early with what they have; others than those in flight are passed over."""
        ended = set(keys)
        with self._between():
            for completion in self._running.abort(ended):
                self._done[completion.key] = completion
            for request in self._waiting:
                if request.key in ended:
                    self._done[request.key] = _empty(request.key)
            self._waiting = deque(request for request in self._waiting if request.key not in ended)

    def pause(self) -> None:
        """Stop after the current token, and return when it is drawn; requests keep their tokens."""
        with self._between():
            self._paused = True

    def resume(self) -> None:
        """Go on after `pause`."""
        with self._between():
            self._paused = False

    def stage_weights(self, version: Version, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Copy new weights beside those in use, while generation goes on; the last staged ones count.

        A tied tensor may be given under one of its names or under all. Raises WeightsError for unknown, missing
        or misshapen tensors, and for a version older than the one in use.
        """
        expected = self._model.state_dict(keep_vars=True)
        staged: dict[str, Tensor] = {}
        for name, tensor in tensors:
            if name not in expected:
                raise WeightsError(f"version {version}: tensor {name} is unknown to this model")
            mine = expected[name]
            if tensor.shape != mine.shape:
                raise WeightsError(
                    f"version {version}: tensor {name} has shape {tuple(tensor.shape)}, expected {tuple(mine.shape)}"
                )
            staged[name] = tensor.detach().to(mine.device, mine.dtype, copy=True)
        with self._turn:
            self._check_open()
            if self._version is not None and version < self._version:
                raise WeightsError(f"version {version} is older than version {self._version}, which is in use")
            self._staged = version, _untied(version, expected, staged)

    def apply_weights(self, version: Version, *, drain: bool = False, recompute: bool = False) -> Version:
        """Switch between two tokens to what is staged: this version, or a newer one; return the one then in use.

        With `drain` nothing begins from now on, and the call waits until what runs has ended, drawing its tokens if
        nobody else does. With `recompute` one pass over what runs renews its keys and values before its next token.
        """
        with self._turn:
            self._check_open()
            self._check_there(version)
        with self._drained(version) if drain else self._between():
            self._check_there(version)
            if self._staged is not None and self._staged[0] >= version:
                self._switch(*self._staged)
                if recompute:
                    self._running.outdate()
            assert self._version is not None
            return self._version

    def _check_there(self, version: Version) -> None:
        there = [has for has in (self._version, self._staged and self._staged[0]) if has is not None]
        if max(there, default=-1) < version:
            has = "nothing" if self._staged is None else f"version {self._staged[0]}"
            raise WeightsError(f"version {version} cannot be applied: {has} is staged")

    def _switch(self, version: Version, staged: Mapping[str, Tensor]) -> None:
        tensors = self._model.state_dict(keep_vars=True)
        for name, tensor in staged.items():
            tensors[name].data = tensor
        self._version, self._staged = version, None

    def sleep(self) -> None:
        """Stop after the current token and move the model off an accelerator; what runs keeps its place."""
        with self._between():
            self._asleep = True
            self._model.to("cpu")

    def wake(self) -> None:
        """Undo `sleep`."""
        with self._between():
            self._asleep = False
            self._model.to(self._device)

    def close(self) -> None:
        """Free everything; idempotent. Pending `results` end with QueueClosed."""
        with self._turn:
            self._closed = True
            self._turn.notify_all()
            self._turn.wait_for(lambda: not self._computing)
            self._running, self._staged = Running(self._model), None
            self._waiting.clear()
            self._done.clear()
            self._model.to("meta")

    @contextmanager
    def _drained(self, version: Version) -> Iterator[None]:
        """Hold the lock when nothing runs any more, or when this version is in use without that."""
        with self._turn:
            self._draining += 1
            try:
                while self._computing or (len(self._running) and (self._version or 0) < version):
                    self._check_open()
                    if self._may_compute():
                        self._token()
                    else:
                        self._turn.wait()
                self._check_open()
                yield
            finally:
                self._draining -= 1
                self._turn.notify_all()

    @contextmanager
    def _between(self) -> Iterator[None]:
        """Hold the lock between two tokens."""
        with self._turn:
            self._guests += 1
            try:
                self._turn.wait_for(lambda: not self._computing)
                self._check_open()
                yield
            finally:
                self._guests -= 1
                self._turn.notify_all()

    def _next(self, wanted: set[int]) -> list[Completion]:
        """Wait for completions of `wanted`; compute tokens as long as nobody else does."""
        with self._turn:
            while True:
                self._check_open()
                ready = [key for key in self._done if key in wanted]
                if ready:
                    self._known.difference_update(ready)
                    self._turn.notify_all()  # somebody else is to compute
                    return [self._done.pop(key) for key in ready]
                if not wanted <= self._known:
                    raise DataError(f"request {min(wanted - self._known)} was not submitted, or was yielded already")
                if self._may_compute():
                    self._token()
                else:
                    self._turn.wait()

    def _may_compute(self) -> bool:
        if self._computing or self._guests or self._paused or self._asleep:
            return False
        return not self._draining or len(self._running) > 0

    def _token(self) -> None:
        """Draw one token of each row, or begin requests that have room; holds the lock only before and after."""
        version = self._version
        if version is None:
            raise WeightsError("no weights were applied yet")
        begin = self._admitted()
        self._computing, done = True, []
        self._turn.release()
        try:
            with torch.inference_mode():
                done = self._running.begin(begin, self._limit, version) if begin else self._running.step(version)
        except BaseException as error:
            self._failure = error  # the cache may be half written: nothing can go on from here
            raise
        finally:
            self._turn.acquire()
            self._computing = False
            # Those who wait for their results are many, and most tokens finish none.
            if self._guests or self._closed or self._failure is not None or done:
                self._turn.notify_all()
        self._done.update((completion.key, completion) for completion in done)

    def _admitted(self) -> list[Request]:
        running = len(self._running)
        if self._draining:
            return []
        free = self._max_inflight - running
        if running and (free < max(1, self._max_inflight // 4) or not self._running.joins):
            return []
        return [self._waiting.popleft() for _ in range(min(free, len(self._waiting)))]

    def _check(self, request: Request) -> None:
        length = len(request.prompt)
        if length == 0:
            raise DataError(f"request {request.key} has an empty prompt")
        if length >= self._limit:
            raise DataError(
                f"request {request.key} has {length} prompt tokens, which leaves no room for a response: "
                f"the model takes {self._limit} tokens in all"
            )
        if request.sampling.max_tokens < 1:
            raise DataError(f"request {request.key} asks for {request.sampling.max_tokens} tokens")

    def _check_open(self) -> None:
        if self._closed:
            raise QueueClosed("the inference engine was closed")
        if self._failure is not None:
            raise RuntimeError("the inference engine failed while it computed a token") from self._failure


def _untied(version: Version, expected: Mapping[str, Tensor], staged: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return one tensor for each parameter; the names of a tied one must agree, and one of them suffices."""
    names: dict[int, list[str]] = {}
    for name, tensor in expected.items():
        names.setdefault(id(tensor), []).append(name)
    chosen = {}
    for tied in names.values():
        given = [name for name in tied if name in staged]
        if not given:
            raise WeightsError(f"version {version}: tensor {tied[0]} is missing")
        for other in given[1:]:
            if not torch.equal(staged[given[0]], staged[other]):
                raise WeightsError(f"version {version}: {given[0]} and {other} are tied here, but differ")
        chosen[given[0]] = staged[given[0]]
    return chosen


def _empty(key: int) -> Completion:
    return Completion(key, np.empty(0, np.int64), np.empty(0, np.float32), np.empty(0, np.int32), "abort")
