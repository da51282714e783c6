"""Run the benchmark of the main job; `benchmarks.queue`, `benchmarks.durability` and `benchmarks.soak` are run by their own names."""

from benchmarks import quickstart

quickstart.main()
