"""`compressive data prepare`: download or read a corpus and tokenise it."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tyro

from compressive.cli import guarded, run


@dataclass(frozen=True)
class Prepare:
    """Download or read a corpus and tokenise it."""

    corpus: tyro.conf.Positional[
        Literal["enwik8", "wikitext103", "wikitext2", "pg19", "text", "speech", "ljspeech", "libritts"]
    ]
    """A published corpus, or `text` or `speech` for your own files."""
    paths: tyro.conf.Positional[tuple[Path, ...]] = ()
    """What to read. For text: files (plain, .zip, .gz, .xz), folders with *.txt, or one folder with train/, valid/ and
    test/. For speech: a folder or an archive of wav and flac files. For pg19: the folder written by `compressive data
    pg19 build`. For other published corpora: a file (plain, .zip, .gz, .xz) or folder, instead of a download."""
    source: Path | None = None
    """The same for a single path, as a flag."""
    data_dir: Path = Path("data")
    """Folder of prepared corpora."""
    tokenizer: Literal["auto", "bytes", "words", "bpe", "mulaw", "pcm16"] = "auto"
    """Kind of tokens. auto: words for WikiText, bpe for pg19, mulaw for speech, bytes otherwise.
    For speech: mulaw (8 bits) or pcm16 (16 bits)."""
    vocab_size: int | None = None
    """Vocabulary size, for bpe; 32000 unless given."""
    min_count: int | None = None
    """For words: those that occur fewer times in the train split become <unk>; 1 unless given, which keeps all. With 3,
    as in WikiText, <unk> is seen in training and words that are missing from the vocabulary are predicted better."""
    vocabulary: Path | None = None
    """A tokenizer.json, the folder of a corpus, run or release, or the name of a shipped model, whose vocabulary to use
    instead of learning one."""
    name: str | None = None
    """Name of the corpus and of its folder in data_dir, if not the published name, or that of the only path."""
    split: tuple[float, float, float] = (0.9, 0.05, 0.05)
    """Shares of train, valid and test, for your own text or speech without splits; speech is cut between clips."""
    workers: int = 0
    """Processes that tokenise; 0: one per core for large corpora, else one."""
    force: bool = False
    """Replace a corpus of the same name."""


def main(arguments: list[str], prog: str) -> int:
    """Parse the arguments and prepare."""
    return run(prepare, Prepare, arguments, prog, "Download or read a corpus and tokenise it.")


def prepare(options: Prepare) -> int:
    """Prepare a corpus; errors that a user can fix are one line on stderr and exit code 2."""
    return guarded(lambda: _prepare(options), "compressive data prepare")


def _prepare(options: Prepare) -> int:
    from compressive.data import prepare
    from compressive.runs.shipped import shipped

    vocabulary = None if options.vocabulary is None else shipped(options.vocabulary)
    prepare.prepare(**vars(options) | {"vocabulary": vocabulary})
    return 0
