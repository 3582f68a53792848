"""Export a trained model as one folder, a release: weights, configuration and tokeniser, without training state.

config.json          the run's configuration
model.safetensors    all weights, unsharded
tokenizer.json       the tokeniser
corpus.json          name and fingerprint of the corpus, unless a run of version 0.1 was exported
origin.json          the weights that the run started from, if not random ones
release.json         corpus, step and checkpoint that it was exported from
model.onnx           if asked for: one window with both memories in and out, see `onnx.py`

`compressive evaluate`, `generate` and `analyze` take a release instead of a run.
"""

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Literal

from safetensors import SafetensorError
from safetensors.torch import save_file

from compressive.runs.onnx import ONNX, require_exportable, write_onnx
from compressive.runs.run import CORPUS, ORIGIN, RELEASE, Run
from compressive.runs.trained import WEIGHTS, Trained


def export(
    run: Run,
    out: Path,
    which: Literal["best", "last"] = "best",
    data_dir: Path | None = None,
    onnx: bool = False,
) -> Path:
    """Write a run's model into the new folder `out`, atomically, and return it; `onnx` adds `model.onnx`.

    Raises ValueError if the folder exists or the model has no ONNX form, and OSError, with nothing left behind, if it
    cannot be written.
    """
    if out.exists():
        raise ValueError(f"out={out} exists already: choose another folder, or remove it first")
    exportable = require_exportable(run.config.model) if onnx else None
    trained, tokenizer = Trained.load(run, which), run.tokenizer(data_dir)
    partial = out.with_name(f".{out.name}.partial")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        save_file(trained.weights, partial / WEIGHTS, metadata={"format": "pt"})
        (partial / "config.json").write_text(json.dumps(dataclasses.asdict(run.config), indent=1), "utf-8")
        tokenizer.save(partial)
        for name in (CORPUS, ORIGIN):
            if (run.folder / name).is_file():
                shutil.copyfile(run.folder / name, partial / name)
        about = {"corpus": run.config.data.corpus, "step": trained.step, "checkpoint": which}
        (partial / RELEASE).write_text(json.dumps(about, indent=1), "utf-8")
        # safetensors writes files that only their owner can read; the umask decides for the others.
        (partial / WEIGHTS).chmod((partial / RELEASE).stat().st_mode)
        if exportable is not None:
            write_onnx(trained.model(exportable), partial / ONNX)
        partial.rename(out)
    except BaseException as error:
        shutil.rmtree(partial, ignore_errors=True)
        if isinstance(error, OSError | SafetensorError):  # the latter is none, also if the disk is full
            reason = getattr(error, "strerror", None) or error
            raise OSError(
                f"out={out} cannot be written ({reason}): choose another folder, or free some space"
            ) from error
        raise
    return out


def is_release(run: Run) -> bool:
    """Return whether a folder is a release, which `export` wrote."""
    return (run.folder / RELEASE).is_file()
