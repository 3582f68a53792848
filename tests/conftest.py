"""Where there is no GPU, Triton interprets its kernels; it must be told before anything imports it."""

import os
import shutil

if shutil.which("nvidia-smi") is None:
    os.environ.setdefault("TRITON_INTERPRET", "1")
