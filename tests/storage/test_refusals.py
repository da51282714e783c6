"""What a queue refuses, on every way to reach it, and that a refusal leaves nothing behind."""

import numpy as np
import pytest

from asyncflow.errors import SchemaError


@pytest.mark.parametrize("wish", [{"rows": 1.5}, {"rows": "2"}, {"rows": True}, {"groups": 0.5}])
def test_a_stream_of_a_number_that_is_not_whole_is_refused_and_hurts_nobody(table, wish):
    table.task("any", ("score",))
    with pytest.raises(SchemaError, match="expected a whole number"):
        table.stream("any", **wish)
    assert len(table.put({"score": np.ones(3, np.float32)})) == 3


def test_row_ids_that_are_not_whole_numbers_touch_no_row(table):
    table.put({"score": np.ones(2, np.float32)})
    for call in (lambda: table.drop([0.7], "x"), lambda: table.read([1.9], ("score",)), lambda: table.drop(["0"], "x")):
        with pytest.raises(SchemaError, match="row ids are whole numbers"):
            call()
    assert table.ledger().live == 2


def test_a_finite_number_that_would_become_infinite_is_refused(table):
    with pytest.raises(SchemaError, match="do not fit"):
        table.put({"score": [1e300]})
    assert table.ledger().admitted == 0
    rows = table.put({"score": [float("inf")]})
    assert np.isinf(table.read(rows, ("score",))["score"].array).all()
