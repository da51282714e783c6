"""Which rows or tokens a loss is about, from a batch's columns.

Each function gives a bool of its column's shape, (B,) or (B, R), to be combined with the mask: what it says under
the mask is without meaning.
"""

from collections.abc import Callable, Mapping

from torch import Tensor

Filter = Callable[[Mapping[str, Tensor]], Tensor]


def finished(columns: Mapping[str, Tensor]) -> Tensor:
    """The response came to its end: it is not `truncated`."""
    return columns["truncated"] == 0


def signal(columns: Mapping[str, Tensor]) -> Tensor:
    """The advantage is not 0."""
    return columns["advantage"] != 0


def positive(columns: Mapping[str, Tensor]) -> Tensor:
    """The advantage is above 0."""
    return columns["advantage"] > 0


def negative(columns: Mapping[str, Tensor]) -> Tensor:
    """The advantage is below 0."""
    return columns["advantage"] < 0


FILTERS: Mapping[str, Filter] = {"finished": finished, "signal": signal, "positive": positive, "negative": negative}
"""By name."""
