"""How many prompts begin, by what a board tells; no process, no queue."""

from dataclasses import replace

import pytest

from asyncflow.admission import Admission
from asyncflow.board import Board
from asyncflow.config.model import Data, Model, Pipeline, Reward
from asyncflow.config.training import Train
from asyncflow.data.draws import Draws
from asyncflow.data.order import Order
from asyncflow.execute.messages import Applied, Dropped, Published, Stepped, Worked

GROUP, PROMPTS = 4, 2


def admission(steps: int = 10, waiting: int = 0, **options: object) -> tuple[Admission, Board]:
    config = Pipeline(
        model=Model(path="."),
        data=Data(source="python"),
        reward=Reward(fn="exact_match"),
        train=Train(group_size=GROUP, prompts_per_step=PROMPTS),
        **{"mode": "async", **options},
    )
    board = Board(replicas=("trainer-0", "a", "b"), engines=("a", "b"), group_size=GROUP)
    board.take("trainer-0", Published(0, b""))
    for engine in board.engines:
        board.take(engine, Applied(0))
    return Admission.of(config, board, Draws(Order(1000, seed=0)), steps, lambda: waiting), board


def admitted(own: Admission, board: Board) -> list[int]:
    """Take what there is room for, as the flow does; the numbers of the groups."""
    groups = [draw.group for draw in own.take()]
    board.admit({group: tuple(range(GROUP * group, GROUP * (group + 1))) for group in groups})
    return groups


def trained(board: Board, version: int, groups: tuple[int, ...]) -> None:
    board.take("trainer-0", Stepped("train", version, {}, groups, GROUP * len(groups)))
    board.take("trainer-0", Worked("train", "train", "trainer-0", GROUP * len(groups), 0.0, 0.0, 0.0))


@pytest.mark.parametrize(("bound", "steps"), [(0, 1), (1, 2), (4, 5)])
def test_so_many_steps_begin_at_once_as_may_be_stale_and_one(bound, steps):
    own, board = admission(max_staleness=bound)
    assert admitted(own, board) == list(range(PROMPTS * steps))
    assert admitted(own, board) == []
    trained(board, 1, (0, 1))
    for engine in board.engines:
        board.take(engine, Applied(1))
    assert own.has_news(0)
    own.hear(1)
    assert len(admitted(own, board)) == PROMPTS


def test_no_more_begin_than_the_run_needs():
    own, board = admission(steps=1, max_staleness=4)
    assert len(admitted(own, board)) == PROMPTS


@pytest.mark.parametrize(
    ("options", "more"), [({"on_stale": "wait"}, 1), ({"on_stale": "mask"}, 3), ({"max_staleness": 0}, 1)]
)
def test_where_nothing_may_be_too_old_the_slowest_engine_sets_the_pace(options, more):
    own, board = admission(**options)
    begun = len(admitted(own, board))
    for version in (1, 2, 3):
        trained(board, version, ())
        board.take("a", Applied(version))
    board.take("b", Applied(1))
    own.hear(3)
    assert len(admitted(own, board)) == PROMPTS * more
    board.take("b", Applied(3))
    own.hear(3)
    assert begun + PROMPTS * more + len(admitted(own, board)) == begun + PROMPTS * 3


def test_while_an_evaluation_keeps_the_engines_no_more_begins_than_their_version_allows():
    own, board = admission(on_stale="mask")
    begun = len(admitted(own, board))
    board.pinned = 1
    for version in (1, 2, 3):
        trained(board, version, ())
    own.hear(3)
    assert begun + len(admitted(own, board)) == PROMPTS * 3, "as much as version 1 and a bound of 1 allow"
    assert not own.has_news(3)
    board.pinned = None
    assert own.has_news(3)
    own.hear(3)
    assert len(admitted(own, board)) == PROMPTS * 2


def test_nothing_begins_while_enough_is_finished_and_not_trained():
    own, board = admission(max_staleness=2, run_ahead=1, waiting=PROMPTS * GROUP - 1)
    assert len(admitted(own, board)) == 3 * PROMPTS
    trained(board, 1, (0, 1))
    own.hear(1)
    own = replace(own, waiting=lambda: PROMPTS * GROUP)
    assert admitted(own, board) == [], "a step's worth is finished, and waits"
    trained(board, 2, (2, 3))
    own.hear(2)
    own = replace(own, waiting=lambda: 0)
    assert len(admitted(own, board)) == 2 * PROMPTS


@pytest.mark.parametrize("reason", ["unscored", "requeued"])
def test_what_is_lost_is_replaced_and_what_was_requeued_comes_again(reason):
    own, board = admission(max_staleness=0)
    drawn = {draw.group: draw.prompt for draw in own.take()}
    board.admit({group: tuple(range(GROUP * group, GROUP * (group + 1))) for group in drawn})
    rows = tuple(range(GROUP))
    board.take("reward-0", Dropped("train", "reward", reason, (0,) * GROUP, rows))
    assert own.has_news(0)
    own.hear(0)
    (again,) = own.take()
    assert again.group == PROMPTS
    assert (again.prompt == drawn[0], again.requeued) == ((True, 1) if reason == "requeued" else (False, 0))
    assert own.take() == []
