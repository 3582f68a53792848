"""`compressive data prepare`: download or read a corpus and write its tokens."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tyro

from compressive.cli import guarded, run


@dataclass(frozen=True)
class Prepare:
    """Download or read a corpus and write its tokens."""

    corpus: tyro.conf.Positional[
        Literal["enwik8", "wikitext103", "wikitext2", "pg19", "text", "speech", "ljspeech", "libritts"]
    ]
    """A published corpus, or text or speech of your own."""
    paths: tyro.conf.Positional[tuple[Path, ...]] = ()
    """For text: files (plain, .zip, .gz, .xz), folders with *.txt, or one folder with train/, valid/ and test/."""
    source: Path | None = None
    """For a published corpus: take this file (plain, .zip, .gz, .xz) or folder instead of downloading; for pg19 the
    folder that `compressive data pg19 build` has filled; for speech a folder or archive of wav and flac."""
    data_dir: Path = Path("data")
    """Folder of all corpora."""
    tokenizer: Literal["auto", "bytes", "words", "bpe", "mulaw", "pcm16"] = "auto"
    """How text becomes tokens; auto: words for WikiText, bpe for pg19, bytes for all else. Speech: mulaw, 8 bits, or
    pcm16, all 16."""
    vocab_size: int = 32000
    """Number of tokens, for bpe."""
    vocabulary: Path | None = None
    """A tokenizer.json, or the folder of a corpus that has one, instead of a vocabulary learnt from the train split."""
    name: str | None = None
    """Name of the corpus and of its folder in data_dir; by default the published one, or that of the only path."""
    split: tuple[float, float, float] = (0.9, 0.05, 0.05)
    """For text or speech that is not cut already: shares of train, valid and test; speech is cut between clips."""
    workers: int = 0
    """Processes that tokenise; 0: one per core if there is much to do."""


def main(arguments: list[str], prog: str) -> int:
    """Parse the words, then prepare."""
    return run(prepare, Prepare, arguments, prog, "Download or read a corpus and write its tokens.")


def prepare(options: Prepare) -> int:
    """Prepare a corpus; what a user can mend is one line on stderr and exit code 2."""
    return guarded(lambda: _prepare(options), "compressive data prepare")


def _prepare(options: Prepare) -> int:
    from compressive.data import prepare as room

    room.prepare(**vars(options))
    return 0
