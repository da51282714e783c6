"""Rollout: prompts in, responses out, each with the log-probability and the version of every token.

A response is written as soon as it is finished; its seed follows from its row's identity, so it does not depend on
which rows were generated beside it. When new weights are taken, `switching` knows.
"""

import itertools
from collections.abc import Iterator, Mapping

import numpy as np

from asyncflow.backends import infer_engine
from asyncflow.backends.base import Completion, InferEngine, Request, Sampling
from asyncflow.data.tokenizer import tokenizer
from asyncflow.execute.messages import Applied, Apply, Command, Failed, GaveUp, Staged, Stop, Switch
from asyncflow.seeds import mix
from asyncflow.stage import Context, Drop, Part
from asyncflow.stages.model import model_spec, stop_tokens
from asyncflow.stages.room import Room
from asyncflow.stages.switching import Switching
from asyncflow.storage import Batch
from asyncflow.storage.batch import Column
from asyncflow.types import Int64s
from asyncflow.weights import receiver
from asyncflow.weights.subscriber import Subscriber


class Rollout:
    """Reads `prompt_tokens`, `temperature` and `seed`; writes the response columns."""

    def setup(self, context: Context) -> None:
        config = context.config
        self._context = context
        self._tokenizer = tokenizer(config.model)
        self._stop = stop_tokens(self._tokenizer, config.rollout.stop)
        self._engine: InferEngine = infer_engine(config.rollout.backend)(
            model_spec(config, self._tokenizer, context.resume),
            max_inflight=config.rollout.max_inflight,
            options=config.rollout.options,
        )
        self._subscriber = Subscriber(
            receiver(config, context.replica),
            self._engine.stage_weights,
            lambda version, reason: context.emit(GaveUp(version, reason)),
            timeout=config.weights.timeout,
            delta=config.weights.delta,
        )
        self._switching = Switching(
            self._engine,
            self._subscriber.stage,
            lambda version: context.emit(Applied(version)),
            lambda why: context.emit(Failed(f"in replica {context.replica}, {why}")),
            context.emit,
            when=config.weights.apply,
            recompute=config.weights.kv == "recompute",
            timeout=config.executor.wait_timeout,
            turn=(lambda version: context.emit(Staged(version))) if config.takes_turns else None,
        )
        self._room = Room(lambda: self._engine.capacity, config.train.group_size, config.executor.wait_timeout)
        self._colocated = config.mode == "colocated"
        self._keys = itertools.count()

    def process(self, batch: Batch) -> Iterator[Part | Drop]:
        with self._switching.batch():
            yield from self._answer(batch)

    def _answer(self, batch: Batch) -> Iterator[Part | Drop]:
        requests = self._requests(batch)
        if self._colocated:
            self._engine.wake()
        self._room.submitted(len(requests))
        self._engine.submit(requests)
        place = {request.key: row for row, request in enumerate(requests)}
        for finished in self._engine.results(list(place)):
            self._room.ended(len(finished))
            kept = [completion for completion in finished if completion.finish != "abort"]
            if kept:
                yield self._part(kept, place)
            if len(kept) < len(finished):
                aborted = [place[completion.key] for completion in finished if completion.finish == "abort"]
                yield Drop(np.asarray(aborted, dtype=np.int64), "aborted")
        if self._colocated:
            self._engine.sleep()

    def await_room(self) -> None:
        """Have a lane wait until the engine has room for more than what all of them have brought."""
        self._room.wait()

    def command(self, command: Command) -> None:
        """Take new weights, or end early; waits for neither."""
        if isinstance(command, Apply):
            self._subscriber.hear(command.version, command.offer)
            self._switching.ask(command.version)
        elif isinstance(command, Switch):
            self._switching.go(command.version)
        elif isinstance(command, Stop):
            self._end()

    def close(self) -> None:
        self._end()
        self._switching.join(self._context.config.executor.stop_timeout)

    def _end(self) -> None:
        self._room.close()
        self._switching.close()
        self._subscriber.close()
        self._engine.close()

    def _requests(self, batch: Batch) -> list[Request]:
        config = self._context.config.rollout
        seeds = mix(batch["seed"].array, batch["rollout_id"].array)
        temperatures = batch["temperature"].array.tolist()
        samplings = {
            temperature: Sampling(
                temperature, config.top_p, config.top_k, config.max_response_tokens, tuple(sorted(self._stop))
            )
            for temperature in set(temperatures)
        }
        prompts = [np.asarray(tokens) for tokens in batch["prompt_tokens"]]
        # Keys are the engine's own: several batches may be under way at once.
        return [
            Request(next(self._keys), prompt, samplings[temperature], seed)
            for prompt, temperature, seed in zip(prompts, temperatures, seeds.tolist(), strict=True)
        ]

    def _part(self, finished: list[Completion], place: Mapping[int, int]) -> Part:
        tokens = [completion.tokens for completion in finished]
        lengths = np.array([len(one) for one in tokens])
        columns = Batch(
            {
                "response_text": self._texts(tokens),
                "response_tokens": tokens,
                "response_mask": Column.ragged(
                    np.ones(lengths.sum(), dtype=np.uint8), np.concatenate([[0], lengths.cumsum()]), "list<uint8>"
                ),
                "rollout_logprobs": [completion.logprobs for completion in finished],
                "versions": [completion.versions for completion in finished],
                "finish": [completion.finish for completion in finished],
            }
        )
        return Part(np.array([place[completion.key] for completion in finished], dtype=np.int64), columns)

    def _texts(self, tokens: list[Int64s]) -> list[str]:
        """Decode without the stop token that ends a response."""
        bare = [(one[:-1] if len(one) and int(one[-1]) in self._stop else one).tolist() for one in tokens]
        texts: list[str] = self._tokenizer.batch_decode(bare, skip_special_tokens=True)
        return texts
