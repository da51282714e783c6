"""Samples: every so-manieth step's prompts, responses and scores as a Parquet file in the run's folder."""

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
    "advantage",
)


class Samples:
    """Reads the texts and scores; writes no column."""

    def setup(self, context: Context) -> None:
        self._every = context.config.output.samples_every
        self._steps = context.config.train.steps
        self._folder = context.folder / "samples"
        self._folder.mkdir(parents=True, exist_ok=True)
        self._step = 0 if context.resume is None else int(checkpoint.progress(context.resume)["step"])

    def process(self, batch: Batch) -> None:
        self._step += 1
        if self._step % self._every == 0 or self._step in (1, self._steps):
            write(batch, self._folder / f"step-{self._step:06d}.parquet")

    def close(self) -> None:
        return None


def write(batch: Batch, path: Path) -> None:
    """Write the rows with the newest version among their tokens; the file appears whole or not at all."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    versions, mask = batch["versions"].to_padded(fill=-1)
    last = versions.max(axis=1, initial=-1, where=mask == 1).astype(np.int32)
    rows = batch.select(COLUMNS).with_columns({"version": last})
    partial = path.with_suffix(".partial")
    pq.write_table(pa.Table.from_batches([rows.to_arrow()]), partial)
    partial.replace(path)
