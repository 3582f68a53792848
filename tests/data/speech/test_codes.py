"""Encoding and decoding of samples."""

import numpy as np
import pytest

from compressive.data.speech.codes import MuLawTokenizer, PCMTokenizer, mu_law_amplitudes, mu_law_edges
from compressive.data.tokenizer import load_tokenizer

EVERY = np.arange(-32768, 32768).astype("<i2").tobytes()


def test_mu_law_maps_silence_and_the_extremes():
    codes = MuLawTokenizer().encode(np.array([0, -32768, 32767, 1, -1], "<i2").tobytes())
    assert codes.dtype == np.uint8
    assert codes.tolist() == [128, 0, 255, 128, 127]


def test_mu_law_is_the_formula():
    x = np.array([-20000, -321, -5, 7, 1234, 30000])
    y = np.sign(x) * np.log(1 + 255 * np.abs(x) / 32768) / np.log(256)
    expected = np.floor((y + 1) / 2 * 255 + 0.5)
    assert MuLawTokenizer().encode(x.astype("<i2").tobytes()).tolist() == expected.tolist()


def test_a_decoded_code_is_encoded_as_itself():
    tokenizer, codes = MuLawTokenizer(), np.arange(256)
    assert tokenizer.encode(tokenizer.decode(codes)).tolist() == codes.tolist()


def test_codes_lie_between_their_edges_and_around_their_amplitude():
    x, codes, edges = np.arange(-32768, 32768) / 32768, MuLawTokenizer().encode(EVERY), mu_law_edges()
    assert (edges[codes] <= x).all()
    assert (x <= edges[codes.astype(int) + 1]).all()
    assert (np.diff(edges) > 0).all()
    assert ((edges[:-1] < mu_law_amplitudes()) & (mu_law_amplitudes() < edges[1:])).all()


def test_sixteen_bits_lose_nothing_and_keep_their_order():
    tokenizer = PCMTokenizer()
    codes = tokenizer.encode(EVERY)
    assert codes.dtype == np.uint16
    assert codes.tolist() == list(range(65_536))
    assert tokenizer.decode(codes) == EVERY


@pytest.mark.parametrize("tokenizer", [MuLawTokenizer(), PCMTokenizer()])
def test_chunks_may_be_cut_inside_a_sample(tokenizer, tmp_path):
    chunks = [EVERY[i : i + 1001] for i in range(0, len(EVERY), 1001)]
    assert np.concatenate(list(tokenizer.encode_chunks(chunks))).tolist() == tokenizer.encode(EVERY).tolist()
    tokenizer.save(tmp_path)
    assert type(load_tokenizer(tmp_path)) is type(tokenizer)
    assert tokenizer.is_audio


def test_half_a_sample_is_refused():
    with pytest.raises(ValueError, match="3 bytes: expected 16-bit samples"):
        MuLawTokenizer().encode(b"abc")
    with pytest.raises(ValueError, match="token 256: expected 0 to 255"):
        MuLawTokenizer().decode([256])
