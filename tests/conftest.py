"""Every test computes with one thread: two that wait by spinning on shared cores cost more than they give."""

import os

os.environ.update(OMP_NUM_THREADS="1", OMP_WAIT_POLICY="PASSIVE", GOMP_SPINCOUNT="0", TOKENIZERS_PARALLELISM="false")
