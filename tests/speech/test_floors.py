"""Floors: known values on synthetic audio, and on real speech."""

import numpy as np
import pytest
from helpers import ROOT
from speech_helpers import tiny_speech, tone

from compressive.data.prepare import prepare
from compressive.data.speech.codes import MuLawTokenizer, mu_law_edges
from compressive.speech import floors

REAL = ROOT.parent / "shared" / "data" / "speech" / "callie"


def test_the_unigram_and_bigram_of_made_up_codes():
    train, codes = np.array([0, 1] * 5000, np.uint8), np.array([0, 1] * 50, np.uint8)
    assert floors.unigram(train, codes, 256) == pytest.approx(np.log2(10_256 / 5001))
    # Codes alternate, so the bits are those of the first sample, 8, and of the add-one smoothing.
    assert floors.bigram(train, codes) == pytest.approx(8 / 100 + np.log2(5256 / 5001), abs=0.01)
    noise = np.random.default_rng(0).integers(0, 256, 200_000).astype(np.uint8)
    assert floors.unigram(noise, noise[:5000], 256) == pytest.approx(8, abs=0.01)


def test_linear_prediction_predicts_tones_but_not_noise():
    tokenizer, noise = MuLawTokenizer(), np.random.default_rng(0)

    def codes(x):
        return tokenizer.encode(np.round(32767 * x).astype("<i2").tobytes())

    two_tones = tone(2.0) + tone(2.0, hertz=1234.5, loud=0.2)
    assert floors.linear_prediction(codes(two_tones)) < 3
    assert floors.linear_prediction(codes(noise.uniform(-1, 1, 48_000))) > 6


def test_linear_prediction_is_a_probability_distribution():
    """Score every code after the same past; their probabilities sum to 1."""
    past = MuLawTokenizer().encode(np.round(9000 * np.sin(np.arange(600) / 7)).astype("<i2").tobytes())
    total = 0.0
    before = floors.linear_prediction(past) * 600
    for code in range(256):
        bits = floors.linear_prediction(np.append(past, np.uint8(code))) * 601 - before
        total += 2.0**-bits
    assert total == pytest.approx(1, abs=1e-6)


def test_linear_prediction_never_looks_ahead():
    x = np.random.default_rng(0).normal(0, 0.1, 1000)
    changed = x.copy()
    changed[701:] = 0
    both = [floors._predict(np.zeros(480), y, 32, 120, 480) for y in (x, changed)]
    assert np.array_equal(both[0][:702], both[1][:702])
    assert not np.array_equal(both[0][702:], both[1][702:])


def test_processing_in_pieces_gives_the_same_floors(monkeypatch):
    codes = np.random.default_rng(0).integers(90, 160, 5000).astype(np.uint8)
    whole = [floors.unigram(codes, codes, 256), floors.bigram(codes, codes), floors.linear_prediction(codes)]
    monkeypatch.setattr(floors._pieces, "__defaults__", (700, 0))
    monkeypatch.setattr(floors, "PIECE", 700)
    found = [floors.unigram(codes, codes, 256), floors.bigram(codes, codes), floors.linear_prediction(codes)]
    assert found == pytest.approx(whole, rel=1e-12)
    assert floors.bigram(codes, codes[:1]) == 8


def test_edges_end_in_infinity():
    assert np.isinf(mu_law_edges()[[0, -1]]).all()


def test_sixteen_bits_have_a_unigram_only(tmp_path):
    assert set(floors.floors(tiny_speech(tmp_path, "pcm16"), "test")) == {"unigram"}


def test_a_limit_gives_the_floors_of_the_first_samples(tmp_path):
    corpus = tiny_speech(tmp_path)
    found = floors.floors(corpus, "test", 300)
    assert set(found) == {"unigram", "bigram", "linear_prediction"}
    assert found["unigram"] == floors.unigram(corpus.split("train"), corpus.split("test")[:300], 256)


@pytest.mark.slow
@pytest.mark.skipif(not REAL.is_dir(), reason=f"{REAL} does not exist")
def test_the_floors_of_real_speech(tmp_path):
    found = floors.floors(prepare("speech", (), REAL, tmp_path, "auto", None, None, (0.9, 0.05, 0.05)), "test")
    assert found["unigram"] == pytest.approx(7.743, abs=5e-4)
    assert found["bigram"] == pytest.approx(5.369, abs=5e-4)
    assert found["linear_prediction"] == pytest.approx(3.830, abs=5e-4)
