"""What the server that engines are forked from loads; nothing of it starts a thread that computes.

The settings are read when the libraries are loaded: threads that wait by spinning starve the other engines of this
machine. How many threads each engine has is set in its own process. What is not installed is left to whoever needs it.
"""

import os
from contextlib import suppress
from importlib import import_module

LIBRARIES = (
    "torch",
    "transformers.models.auto.modeling_auto",
    "transformers.modeling_utils",
    "asyncflow.backends.infer.transformers",
    "asyncflow.backends.train.torch",
    "asyncflow.stages.advantage",
    "asyncflow.stages.reference",
    "asyncflow.stages.rollout",
    "asyncflow.stages.train",
)

os.environ.update(OMP_WAIT_POLICY="PASSIVE", GOMP_SPINCOUNT="0", KMP_BLOCKTIME="0")
os.environ.update(TOKENIZERS_PARALLELISM="false", HF_HUB_DISABLE_PROGRESS_BARS="1")
for name in LIBRARIES:
    with suppress(ImportError):
        import_module(name)
