"""The wheel and the source distribution as a new user gets them: what they hold, and a run in a bare environment."""

import os
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

from compressive import __version__
from compressive.runs.shipped import shipped_names

ROOT = Path(__file__).parent.parent
SHIPPED = ("presets/quickstart.toml", "data/pg19/official.csv.xz", "harness/tasks/enwik8.yaml", "py.typed")
"""Data without which a command fails, below compressive/."""


def run(*words, cwd, expected=0, **options):
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    done = subprocess.run(
        [str(word) for word in words], cwd=cwd, env=environment, capture_output=True, text=True, **options
    )
    assert done.returncode == expected, f"{words}\n{done.stdout}\n{done.stderr}"
    return done.stderr if expected else done.stdout


@pytest.mark.soak
def test_a_release_installs_into_a_bare_environment_and_works(tmp_path):
    source = tmp_path / "source"
    run("git", "clone", "--quiet", ROOT, source, cwd=tmp_path)
    run(sys.executable, "-m", "build", "--outdir", tmp_path / "dist", source, cwd=tmp_path)
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    (sdist,) = (tmp_path / "dist").glob("*.tar.gz")
    held = set(zipfile.ZipFile(wheel).namelist())
    assert {f"compressive/{name}" for name in SHIPPED} <= held
    assert {f"compressive/shipped/{name}/model.safetensors" for name in shipped_names()} <= held
    for licence in ("LICENSE", "NOTICE", "src/compressive/data/speech/callie/LICENSE.txt"):
        assert any(name.endswith(f".dist-info/licenses/{licence}") for name in held)
    notice = (ROOT / "NOTICE").read_text("utf-8")
    data = {Path(name).parent for name in held if name.endswith((".bin", ".flac", ".safetensors", ".xz"))}
    assert all(f"src/{folder}" in notice or f"src/{folder.parent}" in notice for folder in data)
    assert not [name for name in held if name.startswith(("tests/", "books/", "docs/"))]
    with tarfile.open(sdist) as archive:
        assert any(name.endswith("/books/README.md") for name in archive.getnames())
        assert not any("/weights/" in name for name in archive.getnames())

    venv.create(tmp_path / "env", with_pip=True)
    python, compressive = tmp_path / "env" / "bin" / "python", tmp_path / "env" / "bin" / "compressive"
    run(python, "-m", "pip", "install", "--quiet", "-c", ROOT / "constraints.txt", wheel, cwd=tmp_path)
    installed = run(python, "-m", "pip", "list", "--format=freeze", cwd=tmp_path).lower()
    for extra in ("matplotlib", "transformers", "gymnasium", "triton", "starlette", "lm_eval"):
        assert f"{extra}==" not in installed, f"the core brings {extra}"

    shutil.copytree(ROOT / "books", tmp_path / "books")
    assert run(compressive, "--version", cwd=tmp_path) == f"compressive {__version__}\n"
    missing = run(compressive, "rl", "watch", "rooms", cwd=tmp_path, expected=2)
    assert "pip install 'compressive[rl]'" in missing
    run(python, "-m", "pip", "install", "--dry-run", "--no-deps", "compressive[rl]", cwd=tmp_path)
    for name in shipped_names():
        if name == "rooms":
            assert "right choices" in run(compressive, "rl", "evaluate", name, "--episodes", "16", cwd=tmp_path)
        else:
            assert len(run(compressive, "generate", name, "--prompt", "The", "--length", "50", cwd=tmp_path)) > 50
    run(compressive, "data", "prepare", "text", "books", "--name", "books", cwd=tmp_path)
    run(compressive, "train", "quickstart", "--train.steps", "20", cwd=tmp_path)
    assert "compressed memory is worth" in run(
        compressive, "analyze", "enwik8-small", "memory", "--tokens", "2048", cwd=tmp_path
    )
    assert run(compressive, "generate", "runs/quickstart", "--prompt", "The", "--length", "20", cwd=tmp_path)
    assert "bits per character" in run(
        compressive, "evaluate", "runs/quickstart", "--split", "test", "--streams", "8", cwd=tmp_path
    )
    timed = (
        "import time; began = time.perf_counter(); import compressive, sys; "
        "print(time.perf_counter() - began, 'torch' in sys.modules)"
    )
    seconds, torch_loaded = run(python, "-c", timed, cwd=tmp_path).split()
    assert float(seconds) < 2
    assert torch_loaded == "False"
