"""Publishing in the background: the trainer copies its weights to host memory, and makes its next step meanwhile."""

import threading
import time
import traceback
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from asyncflow.errors import WeightsError
from asyncflow.execute.messages import Traced
from asyncflow.types import Version
from asyncflow.weights.channel import Sender

if TYPE_CHECKING:
    import torch

SNAPSHOTS = 2
"""Versions that may be in host memory and not yet published."""


class Publisher:
    """Publishes versions one after another in a thread, and tells of each with its offer, or how it failed."""

    def __init__(
        self,
        sender: Sender,
        told: Callable[[Version, bytes], None],
        failed: Callable[[str], None],
        timeout: float,
        traced: Callable[[Traced], None] = lambda traced: None,
    ) -> None:
        self._sender, self._told, self._failed, self._timeout, self._traced = sender, told, failed, timeout, traced
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
        started = time.monotonic()
        owned = list(tensors)
        self._trace("copy", version, started)
        self._worker.submit(self._publish, version, owned)

    def retire(self, version: Version) -> None:
        """Let go of what is older than a version: nobody needs it any more."""
        self._sender.retire(version)

    def close(self) -> None:
        """Wait until everything is published, and let go of it; idempotent."""
        self._worker.shutdown()
        self._sender.close()

    def _publish(self, version: Version, tensors: "list[tuple[str, torch.Tensor]]") -> None:
        started = time.monotonic()
        try:
            offer = self._sender.publish(version, tensors)
            self._trace("publish", version, started)
            self._told(version, offer)
        except Exception:  # noqa: BLE001  the border of this thread: the flow hears of it
            self._failed(f"publishing version {version}\n{traceback.format_exc()}")
        finally:
            self._room.release()

    def _trace(self, what: str, version: Version, started: float) -> None:
        self._traced(Traced(f"weights: {what}", what, started, time.monotonic() - started, {"version": version}))
