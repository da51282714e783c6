"""How a version of the weights travels from the trainer to the rollout engines: manifest, then one file a medium."""

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from asyncflow.storage.arena import sweep
from asyncflow.weights.channel import Receiver, Sender
from asyncflow.weights.collective import CollectiveReceiver, CollectiveSender
from asyncflow.weights.file import FileReceiver, FileSender
from asyncflow.weights.inproc import InprocReceiver, InprocSender
from asyncflow.weights.shm import ShmReceiver, ShmSender
from asyncflow.weights.tcp import TcpReceiver, TcpSender

if TYPE_CHECKING:
    from asyncflow.config.model import Pipeline

__all__ = ["Receiver", "Sender", "clear", "receiver", "sender"]

_LEAST = 3
"""Versions that a sender holds at most, where the bound on staleness asks for no more."""


def sender(config: "Pipeline", folder: Path) -> Sender:
    """Make the trainer's end of the channel of a pipeline; `folder` is the run's."""
    weights = config.weights
    # While engines keep one version for an evaluation the trainer publishes at most staleness + 1 newer ones.
    keep = max(_LEAST, config.staleness + 2)
    match weights.channel:
        case "inproc":
            return InprocSender(keep=keep)
        case "shm":
            return ShmSender(keep=keep, delta=weights.delta)
        case "tcp":
            return TcpSender(weights.host, keep=keep, timeout=weights.timeout)
        case "file":
            return FileSender(folder / "weights", keep=keep)
        case "collective":
            replicas = config.rollout.replicas
            return CollectiveSender(weights.host, keep=keep, timeout=weights.timeout, receivers=replicas)


def receiver(config: "Pipeline", name: str) -> Receiver:
    """Make an engine's end of the channel of a pipeline; `name` is the engine's."""
    match config.weights.channel:
        case "inproc":
            return InprocReceiver()
        case "shm":
            return ShmReceiver()
        case "tcp":
            return TcpReceiver()
        case "file":
            return FileReceiver()
        case "collective":
            return CollectiveReceiver(name)


def clear(folder: Path) -> None:
    """Remove what a trainer has left that was killed; `folder` is the run's."""
    shutil.rmtree(folder / "weights", ignore_errors=True)
    sweep()
