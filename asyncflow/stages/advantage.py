"""Advantage: whole groups of scores in, one advantage a response out, by the algorithm's estimator."""

from collections.abc import Mapping

import numpy as np
import torch

from asyncflow.algorithms import advantages
from asyncflow.algorithms.options import ALGORITHMS
from asyncflow.stage import Context
from asyncflow.storage import Batch
from asyncflow.types import Float64s


class Advantage:
    """Reads the column that `train.reward` names; writes `advantage`."""

    def setup(self, context: Context) -> None:
        self._train = context.config.train

    def process(self, batch: Batch) -> Mapping[str, Float64s]:
        rewards = torch.tensor(batch[self._train.reward].array)
        groups = torch.tensor(batch["group_id"].array)
        algorithm = ALGORITHMS[self._train.algorithm]
        options = {"std": self._train.std} if "std" in algorithm.uses else {}
        result = getattr(advantages, algorithm.advantage)(rewards, groups, **options)
        return {"advantage": result.numpy().astype(np.float64)}

    def close(self) -> None:
        return None
