"""How a version of the weights travels from the trainer to the rollout engines: manifest, then one file a medium."""

from asyncflow.weights.file import FileChannel
from asyncflow.weights.manifest import Manifest, TensorInfo

__all__ = ["FileChannel", "Manifest", "TensorInfo"]
