"""Sources of clips, and the split of each clip."""

import csv
import io
import re
import tarfile
import zipfile
from collections import Counter
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
from speech_helpers import tone, write_audio

from compressive.data.speech.audio import UnusableError
from compressive.data.speech.clips import EMBEDDED, PUBLISHED_SPEECH, by_shares, find_clips, find_published

SHARES = (0.8, 0.1, 0.1)


def found(source):
    """Return names and splits, after opening each clip in turn."""
    result = {}
    for clip in source.clips():
        with clip.open() as file:
            assert file.read(4) in (b"RIFF", b"fLaC")
        result[clip.name] = clip.split
    if set(result.values()) == {None}:
        return {name: by_shares(list(result), source.shares)[name] for name in result}
    return result


@pytest.fixture
def folder(tmp_path):
    for i in range(20):
        write_audio(tmp_path / "clips" / f"speaker{i % 3}" / f"{i:02d}.{'wav' if i % 2 else 'flac'}", tone(0.2))
    (tmp_path / "clips" / "readme.txt").write_text("not audio")
    return tmp_path / "clips"


def packed(folder, path):
    if path.suffix == ".zip":
        with zipfile.ZipFile(path, "w") as archive:
            for file in sorted(folder.rglob("*.*")):
                archive.write(file, file.relative_to(folder))
    else:
        mode: Any = f"w:{path.suffix[1:]}"
        with tarfile.open(path, mode) as archive:
            archive.add(folder, "clips")
    return path


def test_a_folder_is_split_by_clip_deterministically(folder):
    source = find_clips(folder, SHARES)
    first = found(source)
    assert Counter(first.values()) == {"train": 16, "valid": 2, "test": 2}
    assert found(find_clips(folder, SHARES)) == first
    assert source.others == {".txt": 1}
    assert len(source.sums) == 20
    assert list(first) == sorted(first)


@pytest.mark.parametrize("name", ["a.zip", "a.tar.gz", "a.tar.bz2", "a.tar.xz"])
def test_an_archive_is_read_like_a_folder(folder, tmp_path, name):
    source = find_clips(packed(folder, tmp_path / name), SHARES)
    assert Counter(found(source).values()) == {"train": 16, "valid": 2, "test": 2}
    assert list(source.sums) == [name]
    assert source.others == {".txt": 1}


def test_folders_named_after_the_splits_keep_them(tmp_path):
    for split, count in (("train", 2), ("valid", 1), ("test", 3)):
        for i in range(count):
            write_audio(tmp_path / split / f"{i}.wav", tone(0.2))
    assert Counter(found(find_clips(tmp_path, SHARES)).values()) == {"train": 2, "valid": 1, "test": 3}


def test_files_with_clips_end_to_end_are_cut_by_their_manifest():
    clips = list(find_clips(EMBEDDED, SHARES).clips())
    rows = list(csv.DictReader(io.StringIO((EMBEDDED / "manifest.csv").read_text())))
    assert [(clip.split, clip.start, clip.end) for clip in clips] == [
        (row["split"], int(row["start"]), int(row["end"])) for row in rows
    ]
    assert {clip.split for clip in clips} == {"train", "valid", "test"}


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("dev,0,9", "line 2: split 'dev', expected train, valid, test"),
        ("test,0,x", "line 2: '0' to 'x', expected samples"),
    ],
)
def test_an_invalid_clip_manifest_is_refused(tmp_path, row, message):
    for split in ("train", "valid", "test"):
        write_audio(tmp_path / f"{split}.wav", tone(0.2))
    (tmp_path / "manifest.csv").write_text(f"split,start,end\n{row}\n")
    with pytest.raises(ValueError, match=re.escape(message)):
        list(find_clips(tmp_path, SHARES).clips())
    (tmp_path / "manifest.csv").write_text("name\na\n")  # with other columns
    assert sorted(found(find_clips(tmp_path, (0.4, 0.3, 0.3))).values()) == ["test", "train", "valid"]


def test_the_embedded_speech_comes_with_its_licence():
    assert "Creative Commons Attribution" in (EMBEDDED / "LICENSE.txt").read_text()
    assert "Michael S Collins" in (EMBEDDED / "LICENSE.txt").read_text()
    assert sum(file.stat().st_size for file in EMBEDDED.iterdir()) < 500_000


def test_ljspeech_is_split_by_chapter(tmp_path):
    for name in ("LJ001-0001", "LJ048-0009", "LJ049-0001", "LJ050-0273"):
        write_audio(tmp_path / "LJSpeech-1.1" / "wavs" / f"{name}.wav", tone(0.2), 22_050)
    (tmp_path / "LJSpeech-1.1" / "metadata.csv").write_text("LJ001-0001|text|text")
    archive = packed(tmp_path / "LJSpeech-1.1", tmp_path / "LJSpeech-1.1.tar.bz2")
    for source in (archive, tmp_path / "LJSpeech-1.1"):
        clips = found(find_published("ljspeech", [source]))
        assert {PurePosixPath(name).stem: split for name, split in clips.items()} == {
            "LJ001-0001": "train", "LJ048-0009": "train", "LJ049-0001": "valid", "LJ050-0273": "test",
        }  # fmt: skip


def test_libritts_is_split_by_folder(tmp_path):
    for name in ("train-clean-100", "dev-clean", "test-clean", "train-other-500"):
        write_audio(tmp_path / "LibriTTS" / name / "19" / "198" / f"19_198_{name}.wav", tone(0.2))
    clips = found(find_published("libritts", [tmp_path]))
    assert sorted(clips.values()) == ["test", "train", "valid"]


def test_published_speech_has_addresses_and_checksums():
    for published in PUBLISHED_SPEECH.values():
        for url, checksum in published.urls.items():
            assert url.startswith("http")
            assert re.fullmatch("[0-9a-f]{64}", checksum)


def test_sources_that_cannot_be_split_are_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="does not exist: expected a folder or an archive"):
        find_clips(tmp_path / "none", SHARES)
    (tmp_path / "a.txt").write_text("not audio")
    with pytest.raises(ValueError, match=r"has no audio: expected files in \.wav.*found \.txt"):
        find_clips(tmp_path, SHARES)
    write_audio(tmp_path / "a.wav", tone(0.2))
    with pytest.raises(ValueError, match="1 clips to split: expected at least 3"):
        find_clips(tmp_path, SHARES)
    for name in "bc":
        write_audio(tmp_path / f"{name}.wav", tone(0.2))
    with pytest.raises(ValueError, match="leaves none of 3 clips for training"):
        find_clips(tmp_path, (0.1, 0.4, 0.5))


def test_clips_that_cannot_be_used_do_not_move_others_to_another_split_needlessly():
    names = [f"{i}.wav" for i in range(40)]
    whole = by_shares(names, SHARES)
    assert Counter(whole.values()) == {"train": 32, "valid": 4, "test": 4}
    left = [name for name in names if whole[name] != "test"]
    fewer = by_shares(left, SHARES)
    assert Counter(fewer.values()) == {"train": 28, "valid": 4, "test": 4}
    assert sum(fewer[name] != whole[name] for name in left) == 8  # four valid to test, four train to valid


def test_a_member_that_cannot_be_unpacked_is_unusable_and_the_others_are_not(folder, tmp_path):
    path = packed(folder, tmp_path / "a.zip")
    with zipfile.ZipFile(path) as archive:
        first = next(info for info in archive.infolist() if info.filename.endswith(".flac"))
    broken = bytearray(path.read_bytes())
    broken[first.header_offset + 200] ^= 255  # inside the first clip
    path.write_bytes(broken)
    clips = find_clips(path, SHARES).clips()
    clip = next(clips)
    assert clip.name.endswith(first.filename)
    with pytest.raises(UnusableError, match="cannot be decompressed"):
        clip.open()
    rest = list(clips)
    assert len(rest) == 19


def test_archives_that_point_outside_or_are_broken_are_refused(tmp_path):
    path = tmp_path / "a.tar"
    with tarfile.open(path, "w") as archive:
        archive.addfile(tarfile.TarInfo("../../evil.wav"), io.BytesIO())
    with pytest.raises(ValueError, match=r"'../../evil.wav' outside its folder"):
        find_clips(path, SHARES)
    (tmp_path / "b.tar.gz").write_bytes(b"no archive")
    with pytest.raises(ValueError, match=r"b\.tar\.gz is damaged or not an archive"):
        find_clips(tmp_path / "b.tar.gz", SHARES)
    assert not Path(tmp_path.parent / "evil.wav").exists()
