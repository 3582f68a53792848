"""lm-evaluation-harness: importing this registers the model `compressive`; `TASKS` is the folder of our tasks.

import compressive.harness, lm_eval

manager = lm_eval.tasks.TaskManager(include_path=compressive.harness.TASKS)
lm_eval.simple_evaluate("compressive", {"path": "runs/x"}, ["enwik8"], task_manager=manager)
"""

from importlib.util import find_spec
from pathlib import Path

if find_spec("lm_eval") is None:
    raise ModuleNotFoundError("lm-evaluation-harness is not installed: pip install 'compressive[lm-eval]'")

import lm_eval.models  # noqa: F401  # registers its own, which it does not do once another model is registered
from lm_eval.api.registry import model_registry

TASKS = Path(__file__).parent / "tasks"
"""Folder of the task files, for --include_path."""

if "compressive" not in model_registry:  # later versions of lm_eval find it by the entry point in pyproject.toml
    model_registry.register("compressive", target="compressive.harness.model:CompressiveModel")
