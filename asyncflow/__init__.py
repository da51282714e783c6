"""asyncflow: a streaming dataflow engine for reinforcement-learning post-training of language models."""

from pathlib import Path
from typing import TYPE_CHECKING

# In a checkout `backends/` and `storage/` stand beside this folder; an installed copy has them inside it.
_root = Path(__file__).resolve().parent.parent
if (_root / "setup.cfg").is_file() and (_root / "storage" / "__init__.py").is_file():
    __path__.append(str(_root))

if TYPE_CHECKING:
    from asyncflow.flow import Flow
    from asyncflow.observe.summary import Summary

__version__ = "0.1.0"
__all__ = ["Flow", "Summary", "__version__"]

_HOMES = {"Flow": "asyncflow.flow", "Summary": "asyncflow.observe.summary"}


def __getattr__(name: str) -> object:
    """Load the public names on first use, so that importing a part never costs the whole."""
    if name not in _HOMES:
        raise AttributeError(f"module 'asyncflow' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)
