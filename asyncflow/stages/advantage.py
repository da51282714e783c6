"""Advantage: whole groups of scores in, one advantage a response out, by the algorithm's estimator."""

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import torch

from asyncflow.algorithms import advantages
from asyncflow.algorithms.options import ALGORITHMS
from asyncflow.errors import RewardError
from asyncflow.stage import Context
from asyncflow.storage import Batch
from asyncflow.types import Float64s


class Advantage:
    """Reads the column that `train.reward` names; writes `advantage`."""

    def setup(self, context: Context) -> None:
        self._train = context.config.train

    def process(self, batch: Batch) -> Mapping[str, Float64s]:
        rewards = torch.tensor(self._finite(batch))
        groups = torch.tensor(batch["group_id"].array)
        algorithm = ALGORITHMS[self._train.algorithm]
        options = {"std": self._train.std} if "std" in algorithm.uses else {}
        result = getattr(advantages, algorithm.advantage)(rewards, groups, **options)
        return {"advantage": result.numpy().astype(np.float64)}

    def _finite(self, batch: Batch) -> npt.NDArray[np.number]:
        """Return the rewards; RewardError where one is not a finite number: scoring lets none through."""
        column = self._train.reward
        found: npt.NDArray[np.number] = batch[column].array
        wrong = np.flatnonzero(~np.isfinite(found))
        if wrong.size:
            raise RewardError(
                f"column {column} of row {batch['row'].array[wrong[0]]} is {found[wrong[0]]}, and of {wrong.size - 1} "
                "others no finite number either: mend the stage that writes it, or have it drop such rows"
            )
        return found

    def close(self) -> None:
        return None
