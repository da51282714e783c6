"""What every result says of its circumstances: machine, versions, commit, load, and the spread of each figure."""

import json
import os
import platform
import statistics
import subprocess
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path

RESULTS = Path(__file__).parent / "results"
PACKAGES = ("numpy", "torch", "transformers", "pyzmq", "msgspec")


def circumstances() -> dict[str, object]:
    """Describe the machine and the code."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    changed = subprocess.run(["git", "status", "--porcelain", "-uno"], capture_output=True, text=True, check=False)
    return {
        "commit": commit.stdout.strip() + ("+changes" if changed.stdout.strip() else ""),
        "cores": len(os.sched_getaffinity(0)),
        "cpu": _cpu(),
        "load": os.getloadavg()[0],
        "python": platform.python_version(),
        "packages": {name: version(name) for name in PACKAGES},
    }


def spread(values: Sequence[float]) -> dict[str, float]:
    """Minimum, median and maximum of repeated measurements."""
    return {"min": min(values), "median": statistics.median(values), "max": max(values)}


def write(name: str, question: str, result: Mapping[str, object], folder: Path = RESULTS) -> Path:
    """Write a result with its circumstances and return its path."""
    folder.mkdir(exist_ok=True)
    path = folder / f"{name}.json"
    path.write_text(json.dumps({"question": question, **circumstances(), **result}, indent=1) + "\n")
    return path


def _cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()
