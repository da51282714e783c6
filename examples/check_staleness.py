"""Check from outside that a run kept its bound: `python examples/check_staleness.py runs/run`.

Reads nothing but the run's own files: config.yaml, and samples/*.parquet, which hold every step with
`output.samples_every=1`. Prints how many tokens were trained at which age, and fails if one was too old, or if a
row's own staleness is not that of its oldest trained token.
"""

import sys
from collections import Counter
from pathlib import Path

import pyarrow.parquet as pq
import yaml


def ages(folder: Path) -> tuple[Counter[int], Counter[int]]:
    """Count trained and masked tokens by age: the version being trained is one before the version that was made."""
    trained: Counter[int] = Counter()
    masked: Counter[int] = Counter()
    for path in sorted((folder / "samples").glob("step-*.parquet")):
        for row in pq.read_table(path).to_pylist():
            # Runs of phases do not say by which step a row was trained: all of theirs are of age 0.
            own: Counter[int] = Counter()
            for version, used in zip(row.get("versions", []), row.get("trained_mask", []), strict=True):
                (own if used else masked)[row["trained_by"] - 1 - version] += 1
            if own and max(own) != row["staleness"]:
                raise SystemExit(
                    f"{path}: a row says {row['staleness']}, and its oldest trained token is {max(own)} old"
                )
            trained += own
    return trained, masked


def main(folder: Path) -> int:
    """Print the ages; 1 if one is beyond the bound, or none is known."""
    config = yaml.safe_load((folder / "config.yaml").read_text())
    bound = config["max_staleness"] if config["max_staleness"] is not None else int(config["mode"] == "async")
    trained, masked = ages(folder)
    for what, found in (("trained", trained), ("masked", masked)):
        for age, tokens in sorted(found.items()):
            print(f"{tokens:8d} tokens {what} at age {age}")
    if not trained or min(trained) < 0 or max(trained) > bound:
        print(f"the bound of {bound} was not kept" if trained else "no versions: a run of phases, or without samples")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
