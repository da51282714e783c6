"""The TransferQueue: a columnar store for rows in flight between stages, usable alone."""

from asyncflow.storage.batch import Batch
from asyncflow.storage.client import TransferQueue
from asyncflow.storage.schema import Schema

__all__ = ["Batch", "Schema", "TransferQueue"]
