"""What the server that engines are forked from loads; nothing of it starts a thread that computes.

The settings are read when the libraries are loaded: threads that wait by spinning starve the other engines of this
machine. How many threads each engine has is set in its own process. What is not installed is left to whoever needs it.

While it loads, which may take long, this process ends with the thread that started it: a run that fails early, or is
stopped, leaves nothing behind.
"""

import ctypes
import os
import signal
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
    "asyncflow.stages.sft",
    "asyncflow.stages.teacher",
    "asyncflow.stages.train",
    "asyncflow.stages.warmup",
)

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)

_libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
os.environ.update(OMP_WAIT_POLICY="PASSIVE", GOMP_SPINCOUNT="0", KMP_BLOCKTIME="0")
os.environ.update(TOKENIZERS_PARALLELISM="false", HF_HUB_DISABLE_PROGRESS_BARS="1")
for name in LIBRARIES:
    with suppress(ImportError):
        import_module(name)
_libc.prctl(_PR_SET_PDEATHSIG, 0)
