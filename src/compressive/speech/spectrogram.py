"""Spectrograms of audio."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt

from compressive.data.speech.codes import FULL_SCALE, RATE
from compressive.plotting import INK, figure, save, tidy

SPAN = 512  # samples per column, 21 ms
STEP = 128
RANGE = 80.0
"""Dynamic range of the colour scale, in dB."""


def spectrogram(samples: npt.NDArray[np.int16]) -> npt.NDArray[np.float64]:
    """Return the magnitude in dB of samples (n,), (SPAN // 2 + 1, columns); full scale is 0 dB."""
    padded = np.pad(samples / FULL_SCALE, (0, max(0, SPAN - len(samples))))
    columns = np.lib.stride_tricks.sliding_window_view(padded, SPAN)[::STEP] * np.hanning(SPAN)
    magnitude = np.abs(np.fft.rfft(columns, axis=1)) / (SPAN / 4)
    decibels: npt.NDArray[np.float64] = 20 * np.log10(np.maximum(magnitude, 1e-10)).T
    return decibels


def plot_spectrograms(audio: Mapping[str, npt.NDArray[np.int16]], path: Path) -> None:
    """Plot spectrograms below each other, by title, with shared time and colour scales; raises PlotError."""
    fig = figure(9, 0.4 + 2.3 * len(audio))
    panels = fig.subplots(len(audio), 1, squeeze=False, sharex=True)[:, 0]
    spectrograms = {name: spectrogram(samples) for name, samples in audio.items()}
    top = max(float(decibels.max()) for decibels in spectrograms.values())
    image = None
    for axes, (name, decibels) in zip(panels, spectrograms.items(), strict=True):
        seconds = len(audio[name]) / RATE
        image = axes.imshow(
            decibels, origin="lower", aspect="auto", cmap="magma", vmin=top - RANGE, vmax=top,
            extent=(0, seconds, 0, RATE / 2000),
        )  # fmt: skip
        tidy(axes, name, y="kHz", grid="")
    panels[-1].set_xlabel("seconds", fontsize=9, color=INK)
    bar = fig.colorbar(image, ax=list(panels), pad=0.01)
    bar.set_label("dB", fontsize=9, color=INK)
    save(fig, path)
