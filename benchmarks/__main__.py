"""Run every benchmark."""

from benchmarks import quickstart

quickstart.main()
