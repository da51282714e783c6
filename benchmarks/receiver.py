"""A rollout engine as the benchmark of publishing sees it: a process that copies each version into its own memory."""

import time
from collections.abc import Iterable, Mapping
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING

from asyncflow.config.model import Pipeline
from asyncflow.weights import receiver
from asyncflow.weights.subscriber import Subscriber

if TYPE_CHECKING:
    import torch


class Engine:
    """The end of one channel, and what it failed for."""

    def __init__(self, config: Pipeline, memory: "dict[str, torch.Tensor]") -> None:
        self._memory, self.why = memory, ""
        weights = config.weights
        self.subscriber = Subscriber(
            receiver(config, "engine"), self._take, self._give_up, timeout=weights.timeout, delta=weights.delta
        )

    def _take(self, version: int, tensors: "Iterable[tuple[str, torch.Tensor]]") -> None:
        for name, tensor in tensors:
            if name in self._memory:
                self._memory[name].copy_(tensor)
            else:
                self._memory[name] = tensor.clone()

    def _give_up(self, version: int, why: str) -> None:
        self.why = why


def serve(configs: Mapping[str, Pipeline], connection: Connection) -> None:
    """Stage each version that is told of over the channel that is named; answer with the seconds, or why it failed."""
    import torch

    torch.set_num_threads(1)
    memory: dict[str, torch.Tensor] = {}
    engines = {name: Engine(config, memory) for name, config in configs.items()}
    connection.send("ready")
    while True:
        try:
            name, version, offer = connection.recv()
        except EOFError:
            return
        engine, started = engines[name], time.perf_counter()
        engine.subscriber.hear(version, offer)
        staged = engine.subscriber.stage(version)
        connection.send(time.perf_counter() - started if staged else engine.why)
