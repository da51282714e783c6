"""Reward functions that hang, crash and fail for real; the response says how."""

import ctypes
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time

STARTED = time.monotonic()


def act(response):
    if response.startswith("score "):
        return float(response.removeprefix("score "))
    return ACTIONS[response]()


def spin():
    while True:
        pass


def fail():
    raise ValueError("no good")


def pid(response):
    return os.getpid()


def with_child(response):
    """Leave a child behind, tell its id, and hang."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    with open(response, "w") as file:
        file.write(str(child.pid))
    time.sleep(600)


def in_process(response):
    process = multiprocessing.get_context("fork").Process(target=os._exit, args=(0,))
    process.start()
    process.join()
    return process.exitcode == 0


def once(response, item):
    """Hang the first time a mark is seen, and score the second time."""
    with open(item["log"], "a") as file:
        file.write(response + "\n")
    if response == "hang":
        time.sleep(600)
    return 1.0


ACTIONS = {
    "hang": lambda: time.sleep(600),
    "spin": spin,
    "regex": lambda: re.match(r"(a+)+$", "a" * 40 + "b"),
    "exit": lambda: os._exit(3),
    "segv": lambda: ctypes.string_at(0),
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "sysexit": lambda: sys.exit(2),
    "fail": fail,
    "none": lambda: None,
    "nan": lambda: float("nan"),
    "print": lambda: print("x" * 100_000, file=sys.stderr) or 1.0,
    "long": lambda: [][int("1" * 100)],
}
