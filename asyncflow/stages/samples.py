"""Samples: every so-manieth step's prompts, responses and scores as a Parquet file in the run's folder."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from asyncflow import checkpoint
from asyncflow.stage import Context
from asyncflow.storage import Batch

COLUMNS = (
    "prompt_id",
    "group_id",
    "rollout_id",
    "prompt_text",
    "response_text",
    "answer_text",
    "finish",
    "reward",
    "reward_outcome",
    "advantage",
)

AGES = ("trained_by", "staleness", "trained_mask", "versions")
_KEPT = 8
"""Steps whose rows are kept for those that still come: they become readable all at once, and are taken by their ids."""


class Samples:
    """Reads the texts and scores; writes no column.

    In phases a batch is a step, made by the version before the one that the step made. Otherwise rows come as they are
    trained, and say by which step; its file is written anew when more of them come, and holds what has come before.
    """

    def setup(self, context: Context) -> None:
        config = context.config
        self._every, self._steps = config.output.samples_every, config.train.steps
        self._folder = context.folder / "samples"
        self._folder.mkdir(parents=True, exist_ok=True)
        if not context.again:
            self._clear(0 if context.resume is None else int(checkpoint.progress(context.resume)["step"]))
        self._phased = config.phased
        self._before = config.warmup.steps if config.warmup else 0
        self._parts: dict[int, list[Batch]] = {}

    def process(self, batch: Batch) -> None:
        if self._phased:
            step = int(batch["versions"].values.max()) + 1 - self._before
            if self._wanted(step):
                self._write(step, batch, COLUMNS)
            return
        steps = batch["trained_by"].array - self._before
        for step in filter(self._wanted, np.unique(steps).tolist()):
            if step not in self._parts:
                self._parts[step] = self._read(step)
            parts = self._parts[step]
            parts.append(_beside(parts, batch.take(np.flatnonzero(steps == step)).select((*COLUMNS, *AGES))))
            self._write(step, Batch.concat(parts), (*COLUMNS, *AGES))
        for step in sorted(self._parts)[:-_KEPT]:
            del self._parts[step]

    def close(self) -> None:
        return None

    def _wanted(self, step: int) -> bool:
        return step % self._every == 0 or step in (1, self._steps)

    def _clear(self, step: int) -> None:
        """Delete what a run that did not end well has written of later steps, which are made again."""
        for path in self._folder.glob("step-*.parquet"):
            if int(path.stem.removeprefix("step-")) > step:
                path.unlink()

    def _read(self, step: int) -> list[Batch]:
        """Return the rows that the file of a step has, maybe by a replica before this one."""
        import pyarrow.parquet as pq

        path = self._path(step)
        if not path.exists():
            return []
        return [Batch.from_arrow(found).select((*COLUMNS, *AGES)) for found in pq.read_table(path).to_batches()]

    def _path(self, step: int) -> Path:
        return self._folder / f"step-{step:06d}.parquet"

    def _write(self, step: int, batch: Batch, columns: Sequence[str]) -> None:
        write(batch, self._path(step), columns)


def _beside(parts: Sequence[Batch], batch: Batch) -> Batch:
    """Return the rows that are not among those of before: some come again if their replica ended too early."""
    known = {pair for part in parts for pair in _pairs(part)}
    return batch.take([place for place, pair in enumerate(_pairs(batch)) if pair not in known])


def _pairs(batch: Batch) -> list[tuple[int, int]]:
    return list(zip(batch["group_id"].array.tolist(), batch["rollout_id"].array.tolist(), strict=True))


def write(batch: Batch, path: Path, columns: Sequence[str]) -> None:
    """Write the rows with the newest version among their tokens; the file appears whole or not at all."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    versions, mask = batch["versions"].to_padded(fill=-1)
    last = versions.max(axis=1, initial=-1, where=mask == 1).astype(np.int32)
    rows = batch.select(columns).with_columns({"version": last})
    partial = path.with_suffix(".partial")
    pq.write_table(pa.Table.from_batches([rows.to_arrow()]), partial)
    partial.replace(path)
