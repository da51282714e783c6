"""An engine's end: loads a version over a channel and stages it, or gives it up within the bound and says so.

A version that could not be had leaves the engine as it is, with the weights that it uses; the next one is tried again.
What the engine itself refuses is no fault of the way, and raised. With `delta` the last version stays here, in host
memory, and of the next one only those tensors are loaded whose checksums differ.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING

from asyncflow.errors import WeightsError
from asyncflow.types import Version
from asyncflow.weights.channel import Arrived, Receiver
from asyncflow.weights.manifest import TensorInfo

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)

ATTEMPTS = 2


class Subscriber:
    """Brings versions to one engine, one at a time."""

    def __init__(
        self,
        receiver: Receiver,
        into: "Callable[[Version, Iterable[tuple[str, torch.Tensor]]], None]",
        gave_up: Callable[[Version, str], None],
        *,
        timeout: float,
        delta: bool = False,
    ) -> None:
        """`into` takes the tensors of a version, and copies what it keeps; `gave_up` hears what was not to be had."""
        self._receiver, self._into, self._gave_up = receiver, into, gave_up
        self._timeout, self._delta = timeout, delta
        self._offers: dict[Version, bytes] = {}
        self._hearing = threading.Lock()
        self._held: dict[str, torch.Tensor] = {}
        self._infos: dict[str, TensorInfo] = {}

    def hear(self, version: Version, offer: bytes) -> None:
        """Remember where a version is."""
        with self._hearing:
            self._offers[version] = offer

    def stage(self, version: Version) -> bool:
        """Load a version that was heard of and hand it on; False, within the timeout, if it was given up."""
        deadline = time.monotonic() + self._timeout
        with self._hearing:
            offer = self._offers[version]
            self._offers = {other: kept for other, kept in self._offers.items() if other > version}
        why = ""
        for attempt in range(ATTEMPTS):
            with ExitStack() as stack:
                try:
                    arrived = stack.enter_context(self._receiver.load(offer, self._infos, deadline))
                except WeightsError as error:
                    why = str(error)
                    log.warning("attempt %d to load version %d: %s", attempt + 1, version, why)
                    if time.monotonic() < deadline:
                        continue
                    break
                self._hand_on(version, arrived)
                return True
        self._gave_up(version, why)
        return False

    def close(self) -> None:
        """End a load that is under way; idempotent."""
        self._receiver.close()

    def _hand_on(self, version: Version, arrived: Arrived) -> None:
        whole = self._held | dict(arrived.tensors)
        names = arrived.manifest.tensors
        self._into(version, ((name, whole[name]) for name in names))
        if self._delta:
            self._keep(arrived.tensors, names)

    def _keep(self, fresh: "Mapping[str, torch.Tensor]", names: Mapping[str, TensorInfo]) -> None:
        """Keep the version for the next one, in memory of its own, which is used again."""
        for name, tensor in fresh.items():
            own = self._held.get(name)
            if own is not None and (own.dtype, own.shape) == (tensor.dtype, tensor.shape):
                own.copy_(tensor)
            else:
                self._held[name] = tensor.clone()
        self._held = {name: self._held[name] for name in names}
        self._infos = dict(names)
