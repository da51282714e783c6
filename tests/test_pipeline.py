import pytest

from asyncflow.errors import PipelineError
from asyncflow.pipeline import StageSpec, graph


def stage(name: str, reads: str = "", writes: str = "") -> StageSpec:
    return StageSpec(name, tuple(reads.split()), dict.fromkeys(writes.split(), "float64"))


def test_a_stage_stands_after_the_writers_of_what_it_reads():
    found = graph([stage("train", "b c"), stage("two", "a", "b"), stage("three", "b", "c"), stage("source", "", "a")])
    assert [own.name for own in found.stages] == ["source", "two", "three", "train"]
    assert ("two", "three", ("b",)) in found.edges
    assert set(found.columns) == {"a", "b", "c"}


def test_identity_columns_need_no_writer():
    graph([stage("only", "group_id rollout_id")])


def test_a_column_that_nobody_writes_is_refused():
    with pytest.raises(PipelineError, match="stage two reads column x, which no stage writes; there are a"):
        graph([stage("source", "", "a"), stage("two", "x")])


def test_two_writers_of_one_column_are_refused():
    with pytest.raises(PipelineError, match="column a has two writers: one and two"):
        graph([stage("one", "", "a"), stage("two", "", "a")])


def test_a_cycle_is_refused_and_named():
    with pytest.raises(PipelineError, match=r"cycle: .*one.*two|cycle: .*two.*one"):
        graph([stage("one", "b", "a"), stage("two", "a", "b")])


def test_writing_an_identity_column_is_refused():
    with pytest.raises(PipelineError, match="writes the identity column group_id"):
        graph([stage("one", "", "group_id")])


def test_two_stages_of_one_name_are_refused():
    with pytest.raises(PipelineError, match="two stages are called one"):
        graph([stage("one", "", "a"), stage("one", "", "b")])


def test_every_fault_is_reported_at_once():
    with pytest.raises(PipelineError) as caught:
        graph([stage("one", "x", "a"), stage("two", "y", "a")])
    assert len(str(caught.value).splitlines()) == 3
