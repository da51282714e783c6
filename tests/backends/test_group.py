"""Data-parallel ranks in processes of their own, over gloo."""

import numpy as np
import pytest

from tests.backends import ranks
from tests.backends.test_value import valued
from tests.backends.tiny import batch

UNEVEN = [([0, 1, 2, 3, 4, 5, 6, 7, 8, 9], [10, 11, 12]), (list(range(13)), []), ([12, 3], [5, 8, 1])]
"""Of three steps, the rows of each of two ranks; one of them gets none in the second."""


@pytest.mark.parametrize(
    ("aggregate", "packing"),
    [("token-mean", False), ("seq-mean-token-mean", False), ("seq-mean-token-sum-norm", False), ("token-mean", True)],
)
def test_ranks_step_as_one_rank_does_on_all_rows(tmp_path, aggregate, packing):
    rows = batch(13, empty=True)
    wholes = [rows.take([*first, *second]) for first, second in UNEVEN]
    own = ranks.engine()
    alone = ranks.train(own, [(whole, whole) for whole in wholes], aggregate)
    shares = [[(rows.take(step[rank]), whole) for step, whole in zip(UNEVEN, wholes, strict=True)] for rank in range(2)]
    tasks = [(share, aggregate) for share in shares]
    with ranks.started(tmp_path, ranks.train, tasks, packing=packing) as running:
        first, second = ranks.answers(running)
    assert first["counts"] == second["counts"], "as many micro-batches on every rank"
    assert second["weights"] == {}, "rank 0 speaks for all"
    assert first["version"] == second["version"] == 3
    for found in (first, second):
        np.testing.assert_allclose(found["norms"], alone["norms"], rtol=1e-10)
    assert first["weights"].keys() == alone["weights"].keys()
    for name, expected in alone["weights"].items():
        np.testing.assert_allclose(first["weights"][name], expected, rtol=1e-9, atol=1e-12, err_msg=name)


def test_a_critic_beside_the_policy_steps_as_on_one_rank_and_stays_equal_on_all(tmp_path):
    rows = valued(13)
    wholes = [rows.take([*first, *second]) for first, second in UNEVEN]
    alone = ranks.train_both(ranks.engine(), ranks.ALONE, [(whole, whole) for whole in wholes], rows)
    shares = [[(rows.take(step[rank]), whole) for step, whole in zip(UNEVEN, wholes, strict=True)] for rank in range(2)]
    tasks = [(shares[0], rows), (shares[1], rows.take([0]))]
    with ranks.started(tmp_path, ranks.train_both, tasks) as running:
        first, second = ranks.answers(running)
    assert first["valued"] > second["valued"] == 1, "each rank finds values for rows of its own"
    for found in (first, second):
        np.testing.assert_allclose(found["norms"], alone["norms"], rtol=1e-9)
        for name, expected in alone["weights"].items():
            np.testing.assert_allclose(found["weights"][name], expected, rtol=1e-9, atol=1e-12, err_msg=name)
    assert all((first["weights"][name] == second["weights"][name]).all() for name in first["weights"])


def test_every_rank_hears_what_all_say(tmp_path):
    said = [b"", b"a longer one", b"x"]
    with ranks.started(tmp_path, ranks.swap, [(each,) for each in said]) as running:
        assert ranks.answers(running) == [said] * 3


def test_a_rank_that_dies_ends_the_wait_of_the_others(tmp_path):
    with ranks.started(tmp_path, ranks.wait, [(), ()], timeout=300.0) as running:
        (_, first), (second, _) = running
        assert ranks.answers(running) == ["there"] * 2
        second.kill()
        assert first.poll(60.0), "rank 0 still waits for a rank that is gone"
        assert "Traceback" in first.recv()
