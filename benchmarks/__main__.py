"""Run the benchmark of the main job; the others of this folder are run by their own names (`benchmarks.queue`)."""

from benchmarks import quickstart

quickstart.main()
