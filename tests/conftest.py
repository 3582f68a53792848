"""Environment of the tests, set before anything imports torch or Triton."""

import os
import shutil

os.environ.setdefault("OMP_NUM_THREADS", "1")  # models are tiny, and bit-exact only to runs with as many threads
if shutil.which("nvidia-smi") is None:
    os.environ.setdefault("TRITON_INTERPRET", "1")  # where there is no GPU, Triton interprets its kernels
