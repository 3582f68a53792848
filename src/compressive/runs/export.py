"""Export a trained model as one folder, a release: weights, configuration and tokeniser, without training state.

config.json          the run's configuration
model.safetensors    all weights, unsharded
tokenizer.json       the tokeniser
release.json         corpus, step and checkpoint that it was exported from

`compressive evaluate`, `generate` and `analyze` take a release instead of a run.
"""

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Literal

from safetensors.torch import save_file

from compressive.runs.run import Run
from compressive.runs.trained import ABOUT, WEIGHTS, Trained


def export(run: Run, out: Path, which: Literal["best", "last"] = "best", data_dir: Path | None = None) -> Path:
    """Write a run's model into the new folder `out`, atomically, and return it; raise ValueError if it exists."""
    if out.exists():
        raise ValueError(f"out={out} exists already: choose another folder, or remove it first")
    trained, corpus = Trained.load(run, which), run.corpus(data_dir)
    partial = out.with_name(f".{out.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        save_file(trained.weights, partial / WEIGHTS, metadata={"format": "pt"})
        (partial / "config.json").write_text(json.dumps(dataclasses.asdict(run.config), indent=1), "utf-8")
        corpus.tokenizer.save(partial)
        about = {"corpus": corpus.name, "step": trained.step, "checkpoint": which}
        (partial / ABOUT).write_text(json.dumps(about, indent=1), "utf-8")
        partial.rename(out)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return out
