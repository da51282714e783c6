"""The two ends of every channel, and a process that loads what it is told to until it is killed."""

import time
from multiprocessing.connection import Connection
from pathlib import Path

from asyncflow.errors import WeightsError
from asyncflow.weights import Receiver, Sender
from asyncflow.weights.collective import CollectiveReceiver, CollectiveSender
from asyncflow.weights.file import FileReceiver, FileSender
from asyncflow.weights.inproc import InprocReceiver, InprocSender
from asyncflow.weights.layout import info
from asyncflow.weights.shm import ShmReceiver, ShmSender
from asyncflow.weights.tcp import TcpReceiver, TcpSender

PATIENCE = 60.0
"""Seconds after which a test gives up; far more than a slow machine needs."""
KEEP = 3


def sender(channel: str, folder: Path, timeout: float = PATIENCE) -> Sender:
    match channel:
        case "file":
            return FileSender(folder, keep=KEEP)
        case "shm":
            return ShmSender(keep=KEEP)
        case "tcp":
            return TcpSender("127.0.0.1", keep=KEEP, timeout=timeout)
        case "collective":
            return CollectiveSender("127.0.0.1", keep=KEEP, timeout=timeout, receivers=1)
    return InprocSender(keep=KEEP)


def receiver(channel: str) -> Receiver:
    kinds = {"file": FileReceiver, "shm": ShmReceiver, "tcp": TcpReceiver, "inproc": InprocReceiver}
    return CollectiveReceiver("here") if channel == "collective" else kinds[channel]()


def serve(channel: str, connection: Connection) -> None:
    """Load each version that is offered, say so, keep it until told, and say what it has become."""
    own = receiver(channel)
    while True:
        offer = connection.recv()
        try:
            with own.load(offer, {}, time.monotonic() + PATIENCE) as arrived:
                connection.send("arrived")
                connection.recv()
                found = {name: info(tensor) for name, tensor in arrived.tensors.items()}
                connection.send(found == arrived.manifest.tensors)
        except WeightsError as error:
            connection.send(str(error))


def publish(channel: str, folder: Path, connection: Connection) -> None:
    """Publish a version and wait to be killed."""
    import torch

    own = sender(channel, folder)
    connection.send(own.publish(1, [("w", torch.ones(1000))]))
    connection.recv()
