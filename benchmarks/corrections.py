"""Does a correction help where data are stale?

python -m benchmarks.corrections [--seeds N …] [--case CASE …] [--set KEY=VALUE …] [--output FOLDER]
"""

from benchmarks.curves import Study

HEAD = """# What a correction is worth where data are stale

Made by `python -m benchmarks.corrections` from [its result](../benchmarks/results/corrections.json): the quickstart's
task, [examples/quickstart.yaml](../examples/quickstart.yaml), in mode `async` with `max_staleness: 8`, in which most
rows are trained as old as they may be. A figure is the median over the seeds, with the least and the greatest. `fresh`
is mode `colocated`. `no ratio` is a plain policy gradient on stale data, as if they were fresh; `clipped` is what
`off_policy: none` does otherwise, PPO's clip on the ratio to the version that made a token. The others are those of
[algorithms](algorithms.md).

"""
STALE = ["mode=async", "max_staleness=8", "rollout.max_inflight=192"]
STUDY = Study(
    name="corrections",
    question="Does a correction help where data are stale?",
    title="Eight versions stale, with and without a correction",
    cases={
        "fresh": ["mode=colocated"],
        "no ratio": [*STALE, "train.loss=pg"],
        "clipped": STALE,
        "tis": [*STALE, "train.off_policy=tis"],
        "tis, sequence": [*STALE, "train.off_policy=tis", "train.off_policy_level=sequence"],
        "icepop": [*STALE, "train.off_policy=icepop", "train.off_policy_low=0.5"],
        "decoupled": [*STALE, "train.off_policy=decoupled"],
        "a3po": [*STALE, "train.off_policy=a3po"],
    },
    head=HEAD,
)

if __name__ == "__main__":
    STUDY.main()
