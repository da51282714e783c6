"""Check from outside that a run kept its bound: `python examples/check_staleness.py runs/run`.

Reads nothing but the run's own files: config.yaml, and samples/*.parquet, which hold every step with
`output.samples_every=1`. Prints how many tokens were trained at which age, and fails if one was too old.
"""

import sys
from collections import Counter
from pathlib import Path

import pyarrow.parquet as pq
import yaml


def ages(folder: Path) -> Counter[int]:
    """Count the sampled tokens by age: the version being trained is one before the version that was made."""
    found: Counter[int] = Counter()
    for path in sorted((folder / "samples").glob("step-*.parquet")):
        for row in pq.read_table(path).to_pylist():
            # Runs of phases do not say by which step a row was trained: all of theirs are of age 0.
            found.update(row["trained_by"] - 1 - version for version in row.get("versions", []))
    return found


def main(folder: Path) -> int:
    """Print the ages; 1 if one is beyond the bound, or none is known."""
    config = yaml.safe_load((folder / "config.yaml").read_text())
    bound = config["max_staleness"] if config["max_staleness"] is not None else int(config["mode"] == "async")
    found = ages(folder)
    for age, tokens in sorted(found.items()):
        what = "masked" if age > bound and config["on_stale"] == "mask" else "trained"
        print(f"{tokens:8d} tokens {what} at age {age}")
    late = sum(tokens for age, tokens in found.items() if age > bound)
    if not found or min(found) < 0 or (late and config["on_stale"] != "mask"):
        print(f"the bound of {bound} was not kept" if found else "no versions: a run of phases, or without samples")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
