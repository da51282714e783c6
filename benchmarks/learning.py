"""Does every mode learn the quickstart's task, and under every bound?

python -m benchmarks.learning [--seeds N …] [--case CASE …] [--set KEY=VALUE …] [--output FOLDER]
"""

from benchmarks.curves import Study

HEAD = """# What is learned in each mode

Made by `python -m benchmarks.learning` from [its result](../benchmarks/results/learning.json): the quickstart's task,
[examples/quickstart.yaml](../examples/quickstart.yaml), in each mode, with several seeds. A figure is the median over
the seeds, with the least and the greatest. `async, 4` is the mode `async` with `max_staleness: 4`; there is no
correction for what is off-policy. How fast the modes are is another question: runs of this table may have had other
work beside them, and two cores that take turns have nothing to overlap.

"""
STUDY = Study(
    name="learning",
    question="Does every mode learn the quickstart's task, and under every bound?",
    title="The quickstart's task in each mode",
    cases={
        "colocated": ["mode=colocated"],
        "separated": ["mode=separated"],
        "streaming": ["mode=streaming"],
        "async, 0": ["mode=async", "max_staleness=0"],
        "async, 1": ["mode=async", "max_staleness=1"],
        "async, 4": ["mode=async", "max_staleness=4"],
    },
    head=HEAD,
)

if __name__ == "__main__":
    STUDY.main()
