"""Baselines for audio without a neural network, in bits per sample: floors that a model has to beat.

Each scores every sample of a split once, the first ones included, as the models do:

- unigram: code frequencies in training;
- bigram: code frequencies after each code;
- linear prediction: each sample as a linear function of the 32 before it. The coefficients are refitted every 5 ms to
  the last 20 ms. The prediction is the centre of a Laplace distribution as wide as recent errors. Nothing is trained.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from compressive.data.corpus import Corpus
from compressive.data.speech.codes import mu_law_amplitudes, mu_law_edges

Floats = npt.NDArray[np.float64]
Codes = npt.NDArray[np.integer[Any]]

ORDER = 32
FRAME, REACH = 120, 480
"""Samples between two fits, 5 ms, and samples that each fit uses, 20 ms."""
DECAY = 0.99
"""Decay of the running mean of errors that sets the width: a time constant of 100 samples."""
LEAST_WIDTH = 1e-4
DOUBT = 1e-3
"""Probability mass spread uniformly, so that no sample costs more than 18 bits."""
BATCH = 4096  # fits per batch
PIECE = 1 << 22  # samples processed at a time, to bound memory


def floors(corpus: Corpus, split: str, limit: int | None = None) -> dict[str, float]:
    """Return bits per sample of a split, or of its first `limit` samples, by baseline; pcm16 has the unigram only.

    Most pairs of 65,536 codes never occur in training, and linear prediction assumes mu-law codes.
    """
    train, codes = corpus.split("train"), corpus.split(split)[:limit]
    found = {"unigram": unigram(train, codes, corpus.vocab_size)}
    if corpus.tokenizer.kind == "mulaw":
        found |= {"bigram": bigram(train, codes), "linear_prediction": linear_prediction(codes)}
    return found


def unigram(train: Codes, codes: Codes, vocab_size: int) -> float:
    """Return bits per sample by code frequency in training, with add-one smoothing."""
    counts = sum(np.bincount(piece, minlength=vocab_size) for piece in _pieces(train)) + np.ones(vocab_size)
    bits = -np.log2(counts / counts.sum())
    return float(sum(bits[piece].sum() for piece in _pieces(codes))) / len(codes)


def bigram(train: Codes, codes: Codes) -> float:
    """Return bits per sample by frequency after the previous code, add-one smoothed; the first sample costs 8 bits."""

    def pairs(of: Codes) -> Iterator[npt.NDArray[np.int64]]:
        for piece in _pieces(of, overlap=1):
            yield piece[:-1].astype(np.int64) * 256 + piece[1:]

    counts = sum(np.bincount(piece, minlength=256 * 256) for piece in pairs(train)) + np.ones(256 * 256)
    table = counts.reshape(256, 256)
    bits = -np.log2(table / table.sum(axis=1, keepdims=True)).ravel()
    return float(sum(bits[piece].sum() for piece in pairs(codes)) + 8) / len(codes)


def linear_prediction(
    codes: Codes, order: int = ORDER, frame: int = FRAME, reach: int = REACH, decay: float = DECAY
) -> float:
    """Return bits per sample by linear prediction from the decoded past."""
    past, width, total = np.zeros(max(reach, order)), 0.01, 0.0
    for piece in _pieces(codes, size=PIECE // frame * frame):
        x = mu_law_amplitudes()[piece]
        predicted = _predict(past, x, order, frame, reach)
        widths, width = _recent_mean(np.abs(x - predicted), decay, width)
        total += _laplace_bits(piece.astype(np.int64), predicted, np.maximum(widths, LEAST_WIDTH))
        past = np.concatenate([past, x])[-len(past) :]
    return total / len(codes)


def _pieces(codes: Codes, size: int = PIECE, overlap: int = 0) -> Iterator[Codes]:
    for begin in range(0, max(len(codes) - overlap, 1), size):
        yield np.asarray(codes[begin : begin + size + overlap])


def _laplace_bits(codes: npt.NDArray[np.int64], centre: Floats, width: Floats) -> float:
    """Sum the bits of all codes, each from the mass of a Laplace distribution between the edges of the code."""
    edges = mu_law_edges()
    lower, upper = ((edges[codes + i] - centre) / width for i in (0, 1))
    # Right of the centre, use the mirrored edges: the difference of two values near 1 would lose precision.
    flip = lower > 0
    lower, upper = np.where(flip, -upper, lower), np.where(flip, -lower, upper)
    mass = _laplace(upper) - _laplace(lower)
    return float(-np.log2((1 - DOUBT) * mass + DOUBT / 256).sum())


def _laplace(z: Floats) -> Floats:
    """Return the CDF of the Laplace distribution with mean absolute deviation 1."""
    tail = 0.5 * np.exp(-np.abs(z))
    return np.where(z < 0, tail, 1 - tail)


def _recent_mean(values: Floats, decay: float, mean: float) -> tuple[Floats, float]:
    """Return the exponential mean before each value, starting from `mean`, and the mean after the last."""
    means = []
    for value in values.tolist():
        means.append(mean)
        mean = decay * mean + (1 - decay) * value
    return np.array(means), mean


def _predict(past: Floats, x: Floats, order: int, frame: int, reach: int) -> Floats:
    """Predict each sample, with coefficients by the autocorrelation method; recent samples have more weight."""
    padded, offset = np.concatenate([past, x, np.zeros(-len(x) % frame)]), len(past)
    weights = np.hanning(2 * reach)[:reach]
    size = 1 << (reach + order).bit_length()
    starts = np.arange(0, len(x), frame)
    predicted = np.empty(len(starts) * frame)
    for begin in range(0, len(starts), BATCH):
        batch = starts[begin : begin + BATCH]
        past = padded[batch[:, None] + offset - reach + np.arange(reach)] * weights
        correlation = np.fft.irfft(np.abs(np.fft.rfft(past, size)) ** 2, size)[:, : order + 1]
        coefficients = _levinson(correlation, order)
        rows = padded[batch[:, None] + offset - order + np.arange(order + frame)]
        windows = np.lib.stride_tricks.sliding_window_view(rows, order, axis=1)[:, :frame, ::-1]
        predicted[batch[0] : batch[-1] + frame] = -np.einsum("nfo,no->nf", windows, coefficients).ravel()
    return predicted[: len(x)]


def _levinson(correlation: Floats, order: int) -> Floats:
    """Return prediction error filters, without the leading 1, of a batch of autocorrelations."""
    error = correlation[:, 0] + 1e-9  # regularisation, so that silence has a solution
    filters = np.zeros((len(correlation), order + 1))
    filters[:, 0] = 1
    for i in range(1, order + 1):
        reflection = -(filters[:, :i] * correlation[:, i:0:-1]).sum(axis=1) / error
        filters[:, : i + 1] += reflection[:, None] * filters[:, i::-1]
        error = error * (1 - reflection**2)
    return filters[:, 1:]
