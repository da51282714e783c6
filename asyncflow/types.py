"""Names for the few plain values that cross every border of the program."""

from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt

Version: TypeAlias = int
"""Number of optimizer steps behind a set of weights."""

RowId: TypeAlias = int
"""Key of a row, unique in the life of its table and never used again."""

RowIds: TypeAlias = npt.NDArray[np.int64]
Int32s: TypeAlias = npt.NDArray[np.int32]
Int64s: TypeAlias = npt.NDArray[np.int64]
Float32s: TypeAlias = npt.NDArray[np.float32]
Float64s: TypeAlias = npt.NDArray[np.float64]

StalePolicy: TypeAlias = Literal["mask", "drop", "requeue", "wait"]
"""What becomes of a row that is too old to be trained."""
