"""Makes the sampler of a task by its name."""

from functools import partial

from asyncflow.storage.balanced import Balanced
from asyncflow.storage.groups import Groups
from asyncflow.storage.ordered import Ordered
from asyncflow.storage.ranked import Ranked
from asyncflow.storage.replay import Replay
from asyncflow.storage.sampler import Fifo, Grouped, Sampler
from asyncflow.storage.spec import TaskSpec
from asyncflow.storage.traits import Traits


def sampler(spec: TaskSpec, base: int, groups: Groups, traits: Traits) -> Sampler:
    """Make the sampler that a task names, for rows from `base`."""
    choice = spec.choice
    match spec.sampler:
        case "group":
            return Grouped(base, groups)
        case "ordered":
            return Ordered(base, groups)
        case "token_balanced":
            tokens = partial(traits.tokens, choice)
            return Balanced(base, groups, tokens, choice.budget, ordered=choice.ordered)
        case "freshest":
            return Ranked(base, lambda rows: traits.version(choice, rows))
        case "priority":
            return Ranked(base, lambda rows: traits.priority(choice, rows))
        case "replay":
            return Replay(base, choice, lambda rows: traits.version(choice, rows))
    return Fifo(base)
