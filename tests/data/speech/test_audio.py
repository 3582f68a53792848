"""Audio files: any rate and number of channels, read in blocks; files that are not audio are refused."""

import io
import sys

import numpy as np
import pytest
import soundfile
from speech_helpers import tone, write_audio

from compressive.data.speech import audio


def read(path, **bounds):
    with path.open("rb") as file:
        return np.concatenate(list(audio.read_audio(file, **bounds)))


@pytest.mark.parametrize("kind", [".wav", ".flac"])
def test_24_khz_mono_16_bit_is_unchanged(tmp_path, kind):
    samples = np.random.default_rng(0).integers(-32768, 32768, 150_000).astype(np.int16)
    path = write_audio(tmp_path / f"a{kind}", samples)
    assert np.array_equal(read(path), samples)
    assert np.array_equal(read(path, start=70_000, end=70_500), samples[70_000:70_500])


@pytest.mark.parametrize("rate", [8_000, 16_000, 22_050, 44_100, 48_000, 96_000])
def test_any_rate_becomes_24_khz(tmp_path, rate):
    found = read(write_audio(tmp_path / "a.wav", tone(3.0, rate, 1000.0), rate, subtype="FLOAT"))
    assert abs(len(found) - 72_000) <= 1
    middle = found[12_000:-12_000] / 32768
    expected = tone(3.0, 24_000, 1000.0)[12_000:-12_000]
    assert np.abs(middle - expected[: len(middle)]).max() < 2e-3


def test_frequencies_above_12_khz_are_filtered_out(tmp_path):
    found = read(write_audio(tmp_path / "a.wav", tone(1.0, 48_000, 15_000.0), 48_000))
    assert np.abs(found[2000:-2000]).max() < 10


def test_channels_are_averaged_and_24_bits_rounded(tmp_path):
    left, right = tone(0.5), tone(0.5, hertz=700.0)
    path = write_audio(tmp_path / "a.wav", np.stack([left, right], axis=1), subtype="PCM_24")
    assert np.abs(read(path) / 32768 - (left + right) / 2).max() < 1e-4


def test_samples_above_full_scale_are_clipped(tmp_path):
    found = read(write_audio(tmp_path / "a.wav", tone(0.5, loud=3.0), subtype="FLOAT"))
    assert (found.min(), found.max()) == (-32768, 32767)


def test_files_that_are_not_audio_are_refused(tmp_path):
    with pytest.raises(audio.UnusableError, match="cannot be read as audio"):
        list(audio.read_audio(io.BytesIO(b"RIFF and nothing that follows")))
    broken = write_audio(tmp_path / "a.flac", tone(2.0)).read_bytes()
    with pytest.raises(audio.UnusableError, match="cannot be read as audio"):
        list(audio.read_audio(io.BytesIO(broken[:300] + b"\0" * 300)))
    path = write_audio(tmp_path / "nan.wav", np.array([0.1, np.nan] * 9000), subtype="FLOAT")
    with pytest.raises(audio.UnusableError, match="NaN or infinite"):
        read(path)


def test_a_long_file_is_never_in_memory_at_once(tmp_path):
    path, held = tmp_path / "long.wav", []
    with soundfile.SoundFile(path, "w", 48_000, 2, "PCM_16") as file:
        for _ in range(60):
            file.write(np.stack([tone(1.0, 48_000)] * 2, axis=1))
    with path.open("rb") as file:
        held = [len(block) for block in audio.read_audio(file)]
    assert abs(sum(held) - 60 * 24_000) <= 1
    assert max(held) <= audio.BLOCK


def test_without_soundfile_the_install_command_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "soundfile", None)
    with pytest.raises(audio.AudioMissingError, match=r"pip install 'compressive\[audio\]'"):
        list(audio.read_audio(io.BytesIO()))


def test_a_written_wav_is_read_back_by_anyone(tmp_path):
    samples = np.arange(-500, 500, dtype=np.int16)
    audio.write_wav(tmp_path / "new" / "a.wav", samples.astype("<i2").tobytes())
    assert np.array_equal(audio.read_wav(tmp_path / "new" / "a.wav"), samples)
    found, rate = soundfile.read(tmp_path / "new" / "a.wav", dtype="int16")
    assert rate == 24_000
    assert np.array_equal(found, samples)
