"""Does every recipe learn the quickstart's task?

python -m benchmarks.recipes [--seeds N …] [--case CASE …] [--set KEY=VALUE …] [--output FOLDER]
"""

from benchmarks.curves import Study

HEAD = """# What each recipe learns

Made by `python -m benchmarks.recipes` from [its result](../benchmarks/results/recipes.json): the quickstart's task,
[examples/quickstart.yaml](../examples/quickstart.yaml), by each [recipe](algorithms.md), with several seeds and the
overrides that the result names. A figure is the median over the seeds, with the least and the greatest. The settings
are those that the quickstart has for GRPO: none was tuned, so that this shows that a recipe works, and not which is
better. `dapo` has half as many steps: once nearly everything is right, hardly a group has a signal.

"""
STUDY = Study(
    name="recipes",
    question="Does every recipe learn the quickstart's task?",
    title="The quickstart's task by each recipe",
    cases={
        # Where everything is learned no group has a signal, and DAPO's steps cannot be filled: it gets half of them.
        recipe: [f"train.algorithm={recipe}", *(["train.steps=50"] if recipe == "dapo" else [])]
        for recipe in (
            "grpo", "dr_grpo", "dapo", "gspo", "cispo", "rloo", "maxrl", "reinforce++", "reinforce++-baseline",
        )
    },
    head=HEAD,
)  # fmt: skip

if __name__ == "__main__":
    STUDY.main()
