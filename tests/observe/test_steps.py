from asyncflow.board import Board
from asyncflow.execute.messages import Applied, Dropped, GaveUp, Stepped, Worked
from asyncflow.observe.metrics import Metrics
from asyncflow.observe.steps import StepLog
from asyncflow.rewards.outcome import UNUSUAL


def test_a_step_says_how_far_engines_trail_the_weights_it_began_with_and_how_often_one_gave_up(tmp_path):
    board = Board(replicas=("trainer-0", "a", "b"), engines=("a", "b"), group_size=1)
    metrics = Metrics(tmp_path / "metrics.jsonl")
    log = StepLog(metrics)
    for version, happened in [(1, [("a", Applied(0)), ("b", Applied(0))]), (2, [("a", Applied(1))]), (3, [])]:
        for name, event in happened:
            board.take(name, event)
        if version == 3:
            board.take("b", GaveUp(1, "too slow"))
        log.stepped(Stepped("train", version, {}), board)
        board.take("trainer-0", Stepped("train", version, {}))
        log.worked(Worked("train", "train", "trainer-0", 1, 0.1, 0.1, 0.1), board)
    steps = metrics.of("step")
    metrics.close()
    assert [step["publish_lag_max"] for step in steps] == [0, 1, 2]
    assert [step["weights_given_up"] for step in steps] == [0, 0, 1]


def test_a_step_says_what_was_dropped_since_the_last_one_and_why_and_how_long_it_was(tmp_path):
    board = Board(replicas=("trainer-0",), engines=("a",), group_size=2)
    metrics = Metrics(tmp_path / "metrics.jsonl")
    log = StepLog(metrics)
    drops = {
        1: [Dropped("train", "reward", "reward_timeout", (1, 2), (10, 20), (30, 50))],
        2: [],
        3: [Dropped("train", "train", "stale", (3,), (30,), (8,)), Dropped("train", "rollout", "aborted", (3,), (31,))],
    }
    for version, events in drops.items():
        for event in events:
            board.take("x", event)
            board.take("x", event)  # told again by a replica that has begun again
        log.stepped(Stepped("train", version, {"response_tokens_mean": 10.0, "rows": 6.0}, rows=6), board)
        board.take("trainer-0", Stepped("train", version, {}))
        log.worked(Worked("train", "train", "trainer-0", 1, 0.1, 0.1, 0.1), board)
    steps = metrics.of("step")
    metrics.close()
    assert [step["rows_dropped"] for step in steps] == [2, 0, 2]
    assert [step["dropped"] for step in steps] == [{"reward_timeout": 2}, {}, {"aborted": 1, "stale": 1}]
    assert [step["dropped_response_tokens_mean"] for step in steps] == [40.0, 0.0, 8.0]
    assert [step["generated_response_tokens_mean"] for step in steps] == [(60 + 80) / 8, 10.0, 68 / 7]


def test_a_step_counts_the_outcomes_of_rows_that_left_since_the_last_and_of_those_that_were_trained_all_the_same(
    tmp_path,
):
    board = Board(replicas=("trainer-0",), engines=("trainer-0",), group_size=2)
    metrics = Metrics(tmp_path / "metrics.jsonl")
    log = StepLog(metrics)
    board.take("a", Dropped("train", "reward", "reward_timeout", (1, 1), (1, 2)))
    board.take("a", Dropped("eval", "reward", "reward_timeout", (1,), (1,)))
    for version in (1, 2):
        log.stepped(Stepped("train", version, {"reward_error": 3.0}), board)
        log.worked(Worked("train", "train", "trainer-0", 1, 0.1, 0.1, 0.1), board)
        board.take("a", Dropped("train", "reward", "reward_error", (3,), (5,)))
    steps = metrics.of("step")
    metrics.close()
    assert [[step[f"reward_{outcome}"] for outcome in UNUSUAL] for step in steps] == [[2, 3, 0], [0, 4, 0]]


def test_a_supervised_step_says_nothing_of_what_was_generated(tmp_path):
    board = Board(replicas=("trainer-0",), engines=(), group_size=1)
    metrics = Metrics(tmp_path / "metrics.jsonl")
    log = StepLog(metrics, {"train": 4}, supervised=True)
    event = Stepped("train", 5, {"nll": 2.0, "rows": 3.0, "tokens": 9.0}, rows=3)
    log.stepped(event, board)
    board.take("trainer-0", event)
    log.worked(Worked("train", "train", "trainer-0", 3, 0.1, 0.1, 0.1), board)
    (step,) = metrics.of("step")
    metrics.close()
    assert {name: value for name, value in step.items() if name != "time"} == {
        "kind": "step", "step": 5, "version": 5, "nll": 2.0, "rows": 3.0, "tokens": 9.0,
    }  # fmt: skip
