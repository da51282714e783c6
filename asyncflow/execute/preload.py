"""What the server that engines are forked from loads; it runs nothing that would start a thread.

The settings are read when the libraries are loaded: threads that wait by spinning starve the other engines of this
machine. How many threads each engine has is set in its own process.
"""

import os

os.environ.update(OMP_WAIT_POLICY="PASSIVE", GOMP_SPINCOUNT="0", KMP_BLOCKTIME="0")
os.environ.update(TOKENIZERS_PARALLELISM="false", HF_HUB_DISABLE_PROGRESS_BARS="1")

import torch  # noqa: F401
from transformers import AutoModelForCausalLM  # noqa: F401

import asyncflow.backends.infer.transformers
import asyncflow.backends.train.torch
import asyncflow.stages.advantage
import asyncflow.stages.reference
import asyncflow.stages.rollout
import asyncflow.stages.train  # noqa: F401
