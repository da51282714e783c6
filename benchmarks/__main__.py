"""Run the benchmark of the main job; those of the queue, its durability and the soak are run by their own names."""

from benchmarks import quickstart

quickstart.main()
