"""Reports of runs of any kind, and of runs that still train: written again as they go on."""

import dataclasses
import time
from pathlib import Path

from compressive.analysis.overview import Overview
from compressive.analysis.report.agent import agent_report
from compressive.analysis.report.page import Page, Tile
from compressive.analysis.report.run import Report, Request, configuration, provenance, status, training
from compressive.analysis.report.speech import speech_report
from compressive.analysis.report.text import text_report
from compressive.console import note
from compressive.plotting import require_matplotlib
from compressive.runs.run import Run

SECONDS = 20
"""Seconds between two versions of a live report, at least."""


def report(folder: Path, request: Request) -> Report:
    """Measure a run on text or speech, or an agent, and return its report.

    Raises FileNotFoundError if the folder holds no run, CheckpointError if the run has no checkpoint yet, PlotError if
    matplotlib is missing.
    """
    run = Overview.read(folder)
    if run.kind == "agent":
        return agent_report(run, request)
    # Asked of the tokeniser, as folders of version 0.1 do not tell.
    audio = Run.open(folder).tokenizer(request.data_dir).is_audio
    return speech_report(run, request) if audio else text_report(run, request)


def follow(folder: Path, request: Request, out: Path) -> Report:
    """Write a report to `out` again and again until the run has stopped training; return the last one, not written.

    The model is measured once for every checkpoint; in between, curves and progress are renewed. xz is left out until
    the end: it would take cores away from training.
    """
    require_matplotlib()
    measured: Report | None = None
    checkpoint: Path | None = None
    said = False
    while (run := Overview.read(folder)).state == "training":
        if run.checkpoint is not None and run.checkpoint != checkpoint:
            measured, checkpoint = report(folder, dataclasses.replace(request, xz=False)), run.checkpoint
        found = _progress(run) if measured is None else _renewed(measured, run)
        found = dataclasses.replace(found, page=dataclasses.replace(found.page, refresh=SECONDS))
        found.write(out)
        if not said:
            note(f"{out} is written every {SECONDS} s while {folder} trains; Ctrl-C stops the report, not the run")
            said = True
        time.sleep(SECONDS)
    return report(folder, request)


def _renewed(measured: Report, run: Overview) -> Report:
    """Return a report with the current curves and progress, and the measurements of its checkpoint."""
    curves = training(run, measured.bounds)
    sections = [curves if section.title == curves.title else section for section in measured.page.sections]
    return dataclasses.replace(measured, page=dataclasses.replace(measured.page, sections=sections, status=status(run)))


def _progress(run: Overview) -> Report:
    """Return the report of a run without a checkpoint: its curves only."""
    verdict = f"Training: step {run.steps:,} of {run.config.train.steps:,}"
    about = "There is no checkpoint yet; its model will be measured when there is one."
    tiles = [Tile(f"{run.best:.3f}", run.metric.name, "best validation score so far")] if run.best is not None else []
    found = Page(
        run.folder.resolve().name, verdict, about, tiles, [training(run), provenance(run, 0), configuration(run)],
        status(run),
    )  # fmt: skip
    return Report(found, {"verdict": verdict, "step": run.steps}, verdict)
