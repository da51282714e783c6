"""Publishing in the background: the trainer copies its weights to host memory, and makes its next step meanwhile."""

import threading
import traceback
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Protocol

from asyncflow.errors import WeightsError
from asyncflow.types import Version

if TYPE_CHECKING:
    import torch

SNAPSHOTS = 2
"""Versions that may be in host memory and not yet published."""


class Channel(Protocol):
    """Where versions are published."""

    def publish(self, version: Version, tensors: "Iterable[tuple[str, torch.Tensor]]") -> object:
        """Return when every engine can load the version."""


class Publisher:
    """Publishes versions one after another in a thread, and tells of each, or how it failed."""

    def __init__(
        self, channel: Channel, told: Callable[[Version], None], failed: Callable[[str], None], timeout: float
    ) -> None:
        self._channel, self._told, self._failed, self._timeout = channel, told, failed, timeout
        self._room = threading.Semaphore(SNAPSHOTS)
        self._worker = ThreadPoolExecutor(1, "asyncflow-publish")

    def publish(self, version: Version, tensors: "Iterable[tuple[str, torch.Tensor]]") -> None:
        """Take the tensors of a version, which nobody changes from then on, and return before it is published.

        Waits while as many older ones as fit into memory are not published; WeightsError after the timeout.
        """
        if not self._room.acquire(timeout=self._timeout):
            raise WeightsError(
                f"version {version} cannot be published: {SNAPSHOTS} older ones were not within {self._timeout:g} s"
            )
        owned = list(tensors)
        self._worker.submit(self._publish, version, owned)

    def close(self) -> None:
        """Wait until everything is published; idempotent."""
        self._worker.shutdown()

    def _publish(self, version: Version, tensors: "list[tuple[str, torch.Tensor]]") -> None:
        try:
            self._channel.publish(version, tensors)
            self._told(version)
        except Exception:  # noqa: BLE001  the border of this thread: the flow hears of it
            self._failed(f"publishing version {version}\n{traceback.format_exc()}")
        finally:
            self._room.release()
