"""Every kernel compiles for a Hopper GPU and fits into its shared memory; no GPU is needed."""

import os
import subprocess
import sys

import pytest
from helpers import ROOT

pytestmark = pytest.mark.slow

pytest.importorskip("triton", reason="triton is not installed")


@pytest.mark.parametrize("kernels", ["attention", "reconstruction", "steps", "training", "bands"])
def test_kernels_compile_for_a_gpu(kernels, tmp_path):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, ROOT / "benchmarks" / "machine_code.py", kernels],
        env=environment | {"TRITON_CACHE_DIR": str(tmp_path)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) >= 4
