"""One file for each question; `python -m benchmarks.NAME` answers it and writes results/NAME.json."""
