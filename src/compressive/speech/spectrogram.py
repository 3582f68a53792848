"""Sound as a picture: how much of each frequency there is, moment by moment."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt

from compressive.data.speech.codes import FULL_SCALE, RATE
from compressive.plotting import INK, figure, save, tidy

SPAN = 512  # samples of one column, 21 ms
STEP = 128
RANGE = 80.0
"""Decibels between the brightest and the darkest."""


def spectrogram(samples: npt.NDArray[np.int16]) -> npt.NDArray[np.float64]:
    """Decibels by frequency and time, (SPAN // 2 + 1, columns); full scale is 0."""
    padded = np.pad(samples / FULL_SCALE, (0, max(0, SPAN - len(samples))))
    columns = np.lib.stride_tricks.sliding_window_view(padded, SPAN)[::STEP] * np.hanning(SPAN)
    magnitude = np.abs(np.fft.rfft(columns, axis=1)) / (SPAN / 4)
    decibels: npt.NDArray[np.float64] = 20 * np.log10(np.maximum(magnitude, 1e-10)).T
    return decibels


def plot_spectrograms(sounds: Mapping[str, npt.NDArray[np.int16]], path: Path) -> None:
    """One picture below the other, in one scale of time and of colour."""
    fig = figure(9, 0.4 + 2.3 * len(sounds))
    every = fig.subplots(len(sounds), 1, squeeze=False, sharex=True)[:, 0]
    pictures = {name: spectrogram(samples) for name, samples in sounds.items()}
    top = max(float(picture.max()) for picture in pictures.values())
    image = None
    for axes, (name, picture) in zip(every, pictures.items(), strict=True):
        seconds = len(sounds[name]) / RATE
        image = axes.imshow(
            picture, origin="lower", aspect="auto", cmap="magma", vmin=top - RANGE, vmax=top,
            extent=(0, seconds, 0, RATE / 2000),
        )  # fmt: skip
        tidy(axes, name, y="kHz", grid="")
    every[-1].set_xlabel("seconds", fontsize=9, color=INK)
    bar = fig.colorbar(image, ax=list(every), pad=0.01)
    bar.set_label("dB", fontsize=9, color=INK)
    save(fig, path)
