"""Export a trained agent as one folder, a release: weights and configuration, without the state of training.

config.json          the run's configuration
model.safetensors    all weights
metrics.jsonl        the curve of training
release.json         task, step and checkpoint that it was exported from

`compressive rl evaluate` and `rl watch` take a release instead of a run.
"""

import dataclasses
import json
import shutil
from pathlib import Path

from compressive.rl.run import AgentFolder
from compressive.runs.export import new_release, require_new
from compressive.runs.run import RELEASE
from compressive.runs.weights import WEIGHTS, write_weights


def export(run: AgentFolder, out: Path) -> Path:
    """Write an agent's newest weights into the new folder `out`, atomically, and return it.

    Raises ValueError if the folder exists, CheckpointError if the run has no checkpoint, and OSError, with nothing left
    behind, if it cannot be written.
    """
    require_new(out)
    weights, step = run.weights()
    with new_release(out) as partial:
        write_weights(partial, weights)
        (partial / "config.json").write_text(json.dumps(dataclasses.asdict(run.config), indent=1), "utf-8")
        about = {"task": run.config.task.name, "step": step, "checkpoint": "last"}
        (partial / RELEASE).write_text(json.dumps(about, indent=1), "utf-8")
        # safetensors writes files that only their owner can read; the umask decides for the others.
        (partial / WEIGHTS).chmod((partial / RELEASE).stat().st_mode)
        if (metrics := run.folder / "metrics.jsonl").is_file():
            shutil.copyfile(metrics, partial / metrics.name)
    return out
