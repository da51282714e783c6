"""`asyncflow bench NAME`: run a benchmark of the checkout that this package was installed from."""

import subprocess
import sys
from pathlib import Path

USAGE = 2


def bench(name: str, options: list[str], root: Path | None = None) -> int:
    """Run a benchmark with its own options, in a process of its own; return its exit status."""
    root = Path(__file__).parents[2] if root is None else root
    known = sorted(path.stem for path in (root / "benchmarks").glob("*.py") if _asks(path))
    if not known:
        sys.stderr.write(f"no benchmarks in {root}: they come with a checkout, installed by `pip install -e .`\n")
        return USAGE
    if name not in known:
        sys.stderr.write(f"no benchmark {name!r}; there are {', '.join(known)}\n")
        return USAGE
    return subprocess.run([sys.executable, "-m", f"benchmarks.{name}", *options], cwd=root).returncode


def _asks(path: Path) -> bool:
    """Whether a file is a benchmark: these begin with the question that they answer."""
    return "?" in path.read_text().partition("\n")[0]
