"""A replica: its loops, of which a stage may have several."""

import threading

import numpy as np
import pytest

from asyncflow.execute.messages import Finished, Ready, Worked
from asyncflow.execute.replica import Assignment, Replica
from asyncflow.pipeline import StageSpec, Take
from asyncflow.storage import Batch, Schema, TransferQueue
from tests.test_stage import CONFIG

together = threading.Barrier(3, timeout=60)


def meet(batch: Batch) -> dict[str, object]:
    """Return only when as many batches as there are lanes are being worked on."""
    together.wait()
    return {"y": batch["x"].array}


@pytest.mark.timeout(120)
def test_a_replica_works_on_as_many_batches_at_once_as_it_has_lanes(tmp_path):
    spec = StageSpec("meet", ("x",), {"y": "int64"}, build=f"{__name__}:meet", take=Take(rows=1), lanes=3)
    events = []
    with TransferQueue.open() as queue:
        table = queue.create_table("train", Schema({"x": "int64", "y": "int64"}))
        table.task("meet", ("x",))
        table.put(Batch({"x": np.arange(6)}))
        table.seal()
        Replica(Assignment("meet-0", (spec,), CONFIG, tmp_path), queue, events.append).serve()
        assert table.ledger().done == 6
    assert [type(events[0]), type(events[-1])] == [Ready, Finished]
    assert sum(isinstance(event, Worked) for event in events) == 6
