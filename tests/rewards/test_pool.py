import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncflow.errors import ConfigError, RewardError, WaitTimeout
from asyncflow.rewards.pool import RewardPool, RewardSpec, Sample

FUNCTIONS = Path(__file__).with_name("functions.py")
TIMEOUT = 1.0


def spec(name="act"):
    return RewardSpec(f"{FUNCTIONS}:{name}")


@pytest.fixture(scope="module")
def pool():
    """Two workers that live through the whole module, however often one is killed."""
    pool = RewardPool(spec(), workers=2, timeout=TIMEOUT)
    pool.start()
    yield pool
    pids = pool.pids
    pool.close()
    pool.close()
    assert not any(psutil.pid_exists(pid) for pid in pids)


def statuses(outcomes):
    return [outcome.status for outcome in outcomes]


@settings(deadline=None, max_examples=15)
@given(st.lists(st.sampled_from(["score", "fail", "none"]), max_size=150))
def test_outcomes_come_in_the_order_of_the_samples(pool, kinds):
    samples = [Sample(f"score {row}" if kind == "score" else kind) for row, kind in enumerate(kinds)]
    outcomes = pool.score(samples)
    names = {"score": "ok", "fail": "error", "none": "unscored"}
    assert statuses(outcomes) == [names[kind] for kind in kinds]
    assert [outcome.value for outcome in outcomes] == [
        float(row) if kind == "score" else None for row, kind in enumerate(kinds)
    ]


@pytest.mark.parametrize(
    ("action", "status", "detail"),
    [
        ("hang", "timeout", "scoring took longer than 1 s"),
        ("regex", "timeout", "scoring took longer than 1 s"),
        ("spin", "timeout", "scoring took longer than 1 s"),
        ("exit", "error", "the process that scored it ended, with exit code 3"),
        ("kill", "error", "the process that scored it ended, killed by SIGKILL"),
        ("segv", "error", "the process that scored it ended, killed by SIGSEGV"),
        ("sysexit", "error", "SystemExit: 2"),
        ("fail", "error", "ValueError: no good"),
        ("nan", "error", "asyncflow.errors.RewardError: returned nan, which is not a finite number"),
        ("none", "unscored", "the reward function returned None"),
        ("print", "ok", ""),
    ],
)
def test_one_row_has_its_outcome_and_its_neighbours_their_score(pool, action, status, detail):
    outcomes = pool.score([Sample("score 1"), Sample(action), *[Sample(f"score {n}") for n in range(2, 12)]])
    assert outcomes[1].status == status
    assert outcomes[1].detail.startswith(detail)
    assert [outcome.value for outcome in outcomes if outcome is not outcomes[1]] == [float(n) for n in range(1, 12)]


def test_the_traceback_of_an_error_is_there_and_bounded(pool):
    (outcome, long) = pool.score([Sample("fail"), Sample("long")])
    assert 'raise ValueError("no good")' in outcome.traceback
    assert long.status == "error"
    assert len(long.detail) <= 2000


def test_nothing_to_score(pool):
    assert pool.score([]) == []


def test_every_row_may_hang_or_crash():
    pool = RewardPool(spec(), workers=2, timeout=0.5)
    try:
        assert statuses(pool.score([Sample("hang"), Sample("exit"), Sample("hang"), Sample("exit")])) == [
            "timeout",
            "error",
            "timeout",
            "error",
        ]
        assert pool.replaced == 4
    finally:
        pool.close()


def test_a_row_is_scored_once_though_its_neighbour_hangs(tmp_path):
    item = f'{{"log": "{tmp_path / "log"}"}}'
    responses = ["a", "b", "hang", "c", "d"]
    pool = RewardPool(spec("once"), workers=1, timeout=TIMEOUT)
    try:
        outcomes = pool.score([Sample(response, item=item) for response in responses])
    finally:
        pool.close()
    assert statuses(outcomes) == ["ok", "ok", "timeout", "ok", "ok"]
    assert (tmp_path / "log").read_text().split() == responses


def test_what_a_hung_function_started_dies_with_it(tmp_path):
    pool = RewardPool(spec("with_child"), workers=1, timeout=TIMEOUT)
    try:
        (outcome,) = pool.score([Sample(str(tmp_path / "pid"))])
    finally:
        pool.close()
    assert outcome.status == "timeout"
    child = int((tmp_path / "pid").read_text())
    deadline = time.monotonic() + 60
    while psutil.pid_exists(child) and psutil.Process(child).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_function_may_start_processes_of_its_own():
    pool = RewardPool(spec("in_process"), timeout=20)
    try:
        assert pool.score([Sample("")])[0].value == 1.0
    finally:
        pool.close()


@pytest.mark.parametrize(
    ("text", "kind", "message"),
    [
        ("def g(response): pass", ConfigError, "has no 'f' - did you mean 'g'|has no 'f'; it has: g"),
        ("def f(response, wrod): pass", ConfigError, "nothing provides its parameter 'wrod'"),
        ("import no_such_module", ConfigError, "importing it failed: ModuleNotFoundError"),
        ("import os; os._exit(4)", RewardError, "ended while it started, with exit code 4"),
        ("import time; time.sleep(600)", WaitTimeout, "a reward worker was not ready after 1 s: .*user.py:f"),
    ],
)
def test_a_pool_that_cannot_start_says_why_and_leaves_nothing(tmp_path, text, kind, message):
    (tmp_path / "user.py").write_text(text)
    limit = 1 if kind is WaitTimeout else 60
    pool = RewardPool(RewardSpec(f"{tmp_path / 'user.py'}:f", fields=["word"]), start_timeout=limit)
    before = {child.pid for child in psutil.Process().children()}
    with pytest.raises(kind, match=message):
        pool.start()
    assert {child.pid for child in psutil.Process().children()} <= before


def test_a_slow_start_costs_no_row(tmp_path):
    (tmp_path / "user.py").write_text("import time; time.sleep(1.5)\ndef f(response): return 1")
    pool = RewardPool(RewardSpec(f"{tmp_path / 'user.py'}:f"), timeout=1.0)
    try:
        assert statuses(pool.score([Sample("a")])) == ["ok"]
    finally:
        pool.close()


def test_an_idle_worker_that_died_is_replaced(pool):
    for pid in pool.pids:
        os.kill(pid, 9)
    assert statuses(pool.score([Sample("score 1")] * 6)) == ["ok"] * 6


def test_close_ends_a_call_that_hangs():
    pool = RewardPool(spec(), timeout=600)
    pool.start()
    (pid,) = pool.pids
    caught = []

    def call():
        with pytest.raises(RewardError, match="closed") as error:
            pool.score([Sample("hang")])
        caught.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    psutil.Process(pid)
    while pool._workers[0].board.row < 0:
        time.sleep(0.01)
    pool.close()
    thread.join(10)
    assert len(caught) == 1
    assert not psutil.pid_exists(pid)
    with pytest.raises(RewardError, match="the reward pool is closed"):
        pool.score([Sample("score 1")])


def test_workers_end_when_their_parent_is_gone():
    code = (
        "import os, threading; from asyncflow.rewards.pool import *\n"
        f"p = RewardPool(RewardSpec({str(FUNCTIONS)!r} + ':act'), 2, 600); p.start()\n"
        "threading.Thread(target=p.score, args=([Sample('hang'), Sample('spin')],)).start()\n"
        "import time; time.sleep(0.3); print(*p.pids, flush=True); os.kill(os.getpid(), 9)"
    )
    root = str(Path(__file__).parents[2])
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={"PYTHONPATH": root}, timeout=60
    )
    pids = [int(pid) for pid in done.stdout.split()]
    assert len(pids) == 2, done.stderr
    deadline = time.monotonic() + 10
    while any(psutil.pid_exists(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not [pid for pid in pids if psutil.pid_exists(pid)]
