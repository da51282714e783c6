"""The built-in stages, and how a configuration becomes a list of them.

Each stage's module declares what it reads and writes; `plan` adds where it runs and how many rows it takes at a
time, which is all that a mode changes. Nothing here imports an engine.
"""

from asyncflow.stages.plan import Plan, plan

__all__ = ["Plan", "plan"]
