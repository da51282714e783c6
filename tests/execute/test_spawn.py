"""Processes that are started, or that come too late to be of use."""

import multiprocessing
import subprocess
import sys
import threading
import time

import pytest

from asyncflow.errors import WaitTimeout
from asyncflow.execute.spawn import fork
from tests.system.test_ends import nobody_left


def test_a_process_that_starts_after_nobody_waits_is_ended():
    with pytest.raises(WaitTimeout, match="late"):
        fork(time.sleep, (600,), "late", timeout=0)
    for thread in threading.enumerate():
        if thread.name == "start:late":
            thread.join(60)
    ends = time.monotonic() + 30
    while multiprocessing.active_children() and time.monotonic() < ends:
        time.sleep(0.01)
    assert "late" not in {child.name for child in multiprocessing.active_children()}


def test_a_program_that_ends_while_the_libraries_load_leaves_nothing():
    code = "from asyncflow.execute import spawn; spawn.warm()"
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, start_new_session=True)
    process.communicate(timeout=300)
    assert nobody_left(process)
