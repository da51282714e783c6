"""The soft penalty on long responses; free of torch."""

import numpy as np
import numpy.typing as npt


def overlong(lengths: npt.ArrayLike, longest: int, buffer: int) -> npt.NDArray[np.float64]:
    """Return the penalties (N,) of responses by their tokens (N,).

    0 up to `longest - buffer`, then falling linearly to -1 at `longest`, and -1 beyond. Yu et al. 2025,
    arXiv:2503.14476.
    """
    if not 0 < buffer <= longest:
        raise ValueError(f"buffer {buffer} must be at least 1 and at most longest, {longest}")
    room = longest - buffer - np.asarray(lengths, np.float64)
    return np.clip(room / buffer, -1.0, 0.0)
