"""The keys and values of the running rows, with room to grow in place.

transformers' own layer copies the whole cache for each token; this one writes into free room and hands out a view.
It fits models whose layers all attend to everything before them; others keep transformers' cache, which cannot be
joined with another.
"""

from typing import Any

import torch
from torch import Tensor
from transformers import Cache, DynamicCache
from transformers.cache_utils import DynamicLayer

_GROWTH = 64


class RoomyLayer(DynamicLayer):  # type: ignore[misc, no-untyped-call, unused-ignore]
    """Keys and values (B, heads, length, width): views of buffers that are longer than what they hold."""

    def __init__(self, room: int = 0) -> None:
        super().__init__()  # type: ignore[no-untyped-call, unused-ignore]
        self.room = room
        """Expected growth in tokens."""
        self._buffers: tuple[Tensor, Tensor] | None = None
        self._length = 0

    @property
    def held(self) -> tuple[Tensor, Tensor]:
        """Keys and values, without the room."""
        if self._buffers is None:
            raise ValueError("the layer is empty")
        keys, values = self._buffers
        return keys[:, :, : self._length], values[:, :, : self._length]

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self.hold(key_states[:, :, :0], value_states[:, :, :0], key_states.shape[2])
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append keys and values, and return all."""
        if self._buffers is None:
            self.lazy_initialization(key_states, value_states)
        start, stop = self._length, self._length + key_states.shape[2]
        if self._buffers is None or stop > self._buffers[0].shape[2]:
            self.hold(*self.held, stop - start)
        for buffer, states in zip(self._buffers or (), (key_states, value_states), strict=True):
            buffer[:, :, start:stop] = states
        self._length = stop
        self.keys, self.values = self.held
        return self.held

    def hold(self, keys: Tensor, values: Tensor, more: int = 0) -> None:
        """Hold these, with room for `more` tokens and for what is expected beyond."""
        room = more + min(self.room, max(_GROWTH, keys.shape[2]))
        self._buffers = _roomy(keys, room), _roomy(values, room)
        self._length = keys.shape[2]
        self.keys, self.values = self.held


def new_cache(config: Any, room: int) -> Cache:
    """Return an empty cache: of roomy layers where the model allows it."""
    cache = DynamicCache(config=config)
    if cache.layers and all(type(layer) is DynamicLayer for layer in cache.layers):
        return Cache(layers=[RoomyLayer(room) for _ in cache.layers])
    return cache


def joinable(cache: Cache) -> bool:
    """Whether rows can be appended to the cache, and columns cut off."""
    return all(isinstance(layer, RoomyLayer) for layer in cache.layers)


def select(cache: Cache, rows: Tensor, skip: int, room: int) -> None:
    """Keep these rows (int64), without their first `skip` columns, with room for so many more tokens."""
    if not joinable(cache):
        cache.batch_select_indices(rows)
        return
    for layer in _layers(cache):
        layer.room = room
        keys, values = (held[:, :, skip:].index_select(0, rows) for held in layer.held)
        layer.hold(keys, values)


def join(cache: Cache, other: Cache) -> None:
    """Append the rows of another cache; the shorter of the two is padded on the left."""
    for mine, theirs in zip(_layers(cache), _layers(other), strict=True):
        mine.room = max(mine.room, theirs.room)
        keys, values = (_stacked(first, second) for first, second in zip(mine.held, theirs.held, strict=True))
        mine.hold(keys, values)


def _layers(cache: Cache) -> list[RoomyLayer]:
    return [layer for layer in cache.layers if isinstance(layer, RoomyLayer)]


def _roomy(values: Tensor, room: int) -> Tensor:
    batch, heads, length, width = values.shape
    buffer = values.new_empty(batch, heads, length + room, width)
    buffer[:, :, :length] = values
    return buffer


def _stacked(first: Tensor, second: Tensor) -> Tensor:
    length = max(first.shape[2], second.shape[2])
    return torch.cat([torch.nn.functional.pad(part, (0, 0, length - part.shape[2], 0)) for part in (first, second)])
