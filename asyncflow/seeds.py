"""Seeds that follow from what a row is, not from when it was drawn.

`mix` is SplitMix64 (Steele, Lea and Flood 2014, "Fast splittable pseudorandom number generators") over whole
arrays: equal inputs give equal seeds in every process, and nearby inputs give unrelated ones.
"""

import numpy as np
import numpy.typing as npt

from asyncflow.types import Int64s


def mix(*keys: int | Int64s) -> Int64s:
    """Hash integers or arrays of them, element by element, to seeds from 0 to 2**63 - 1."""
    state: npt.NDArray[np.uint64] = np.zeros((), dtype=np.uint64)
    with np.errstate(over="ignore"):
        for key in keys:
            state = _scramble(state + np.asarray(key, dtype=np.int64).astype(np.uint64))
    return (state >> np.uint64(1)).astype(np.int64)


def _scramble(state: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    state = state + np.uint64(0x9E3779B97F4A7C15)
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))
