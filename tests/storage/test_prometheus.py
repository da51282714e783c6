import re

from asyncflow.storage.prometheus import exposition
from asyncflow.storage.status import MemoryStatus, QueueStatus, TableStatus, TaskCounts, Wait

NAME = re.compile(r'[a-z_]+(\{([a-z]+="(?:[^"\\\n]|\\[\\n"])*",?)+\})? [0-9.e+-]+')


def status(table="train", task="learn", consumer="c"):
    waits = [Wait("2 rows", 1.5, 3, task, consumer, ["reward"]), Wait("2 rows", 4.0, 3, task, consumer)]
    tables = {table: TableStatus(7, 9_000_000, {}, {task: TaskCounts(1, 2, 3, 4, 0.25)}, True, waits=waits)}
    return QueueStatus(tables, 2, 1, None)


def test_every_line_is_a_comment_or_a_sample_and_every_metric_has_help_and_type():
    lines = exposition(status()).splitlines()
    samples = [line for line in lines if not line.startswith("#")]
    assert all(NAME.fullmatch(line) for line in samples), samples
    for line in samples:
        name = re.split(r"[{ ]", line)[0]
        assert any(other.startswith(f"# HELP {name} ") for other in lines)
        assert any(other.startswith(f"# TYPE {name} ") for other in lines)


def test_figures_stand_where_they_belong():
    text = exposition(status())
    assert 'asyncflow_queue_bytes{table="train"} 9e+06\n' in text
    assert 'asyncflow_queue_task_done_rows_total{table="train",task="learn"} 3\n' in text
    assert 'asyncflow_queue_task_oldest_lease_seconds{table="train",task="learn"} 0.25\n' in text
    assert 'asyncflow_queue_longest_wait_seconds{table="train",task="learn",consumer="c"} 4\n' in text


def test_memory_and_disk_are_told_for_each_process_that_has_a_limit():
    kept = MemoryStatus(5, 30, 10, "/disk"), MemoryStatus(12, 0, 10, "/disk", "no space left")
    text = exposition(QueueStatus({}, 0, 1, None, memory=dict(zip(("", "tcp://a"), kept, strict=True))))
    assert 'asyncflow_queue_process_memory_bytes{process="holder"} 5\n' in text
    assert 'asyncflow_queue_process_spilled_bytes{process="holder"} 30\n' in text
    assert 'asyncflow_queue_process_limit_bytes{process="tcp://a"} 10\n' in text
    assert 'asyncflow_queue_process_spill_failing{process="holder"} 0\n' in text
    assert 'asyncflow_queue_process_spill_failing{process="tcp://a"} 1\n' in text


def test_labels_are_escaped():
    text = exposition(status(table='a"b\\c\nd'))
    assert r'{table="a\"b\\c\nd"}' in text
    assert all(NAME.fullmatch(line) for line in text.splitlines() if not line.startswith("#"))


def test_an_empty_queue_has_figures_too():
    assert "asyncflow_queue_failed 1\n" in exposition(QueueStatus({}, 0, 0, "broken"))
