"""Speed and memory of tokenising books, and the time that this implies for all of PG-19.

    python benchmarks/tokenise.py BUILT --workers 1 2
    python benchmarks/tokenise.py BUILT --vocabulary data/pg19

BUILT is a folder written by `compressive data pg19 build`. A vocabulary is learnt from its train split. Then all books
are tokenised with each number of worker processes, starting with empty caches. Memory is the peak sum over all
processes. It includes what learning the vocabulary left allocated: give --vocabulary to measure tokenising alone.
Linux only.
"""

import argparse
import hashlib
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path

from compressive.data.corpus import SPLITS
from compressive.data.pg19.words import OFFICIAL
from compressive.data.prepare import LEARNT
from compressive.data.sources import read_pg19
from compressive.data.tokenizer import BPETokenizer, Tokenizer, load_tokenizer


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("built", type=Path, metavar="BUILT", help="folder with train/, validation/ and test/")
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2], help="numbers of processes to measure")
    parser.add_argument("--vocab-size", type=int, default=32000)
    parser.add_argument(
        "--vocabulary", type=Path, help="a tokenizer.json, or the folder of a corpus; no vocabulary is learnt"
    )
    options = parser.parse_args()

    text = read_pg19(options.built)
    all_of_it = sum(split.bytes for split in OFFICIAL.values())
    tokenizer: Tokenizer
    if options.vocabulary is None:
        with measured("learning a vocabulary", text.sizes["train"], LEARNT):
            tokenizer = BPETokenizer.train(text.splits()["train"], options.vocab_size)
    else:
        tokenizer = load_tokenizer(options.vocabulary)

    for workers in options.workers:
        fresh, count, checksum, splits = tokenizer._restore(tokenizer._state()), 0, hashlib.sha256(), text.splits()
        with measured(f"tokenising, {workers} workers", sum(text.sizes.values()), all_of_it):
            for tokens in fresh.encode_chunks(chain(*(splits[split] for split in SPLITS)), workers):
                count += len(tokens)
                checksum.update(tokens.tobytes())
        print(f"  {count:,} tokens, SHA-256 {checksum.hexdigest()}")


@contextmanager
def measured(doing: str, size: int, pg19: int) -> Iterator[None]:
    """Print the duration of the block, and the peak memory of this process and its children during it."""
    over, peak = threading.Event(), 0

    def watch() -> None:
        nonlocal peak
        while not over.wait(0.1):
            peak = max(peak, sum(resident(process) for process in family()))

    thread = threading.Thread(target=watch)
    thread.start()
    begin, before = time.perf_counter(), sum(os.times()[:4])
    try:
        yield
    finally:
        over.set()
        thread.join()
    seconds, busy = time.perf_counter() - begin, sum(os.times()[:4]) - before
    print(
        f"{doing}: {size / 1e6:.1f} MB in {seconds:.1f} s, {size / seconds / 1e6:.2f} MB/s, "
        f"{size / busy / 1e6:.2f} MB per CPU second, {peak / 1e6:,.0f} MB of memory; "
        f"for PG-19, {pg19 / 1e9:.1f} GB at this speed: {pg19 / size * seconds / 3600:.2f} h"
    )


def family() -> list[int]:
    """Return the ids of this process and its children."""
    own = os.getpid()
    return [own, *map(int, Path(f"/proc/{own}/task/{own}/children").read_text().split())]


def resident(process: int) -> int:
    """Return the resident bytes of a process; 0 if it has ended."""
    try:
        return int(Path(f"/proc/{process}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (FileNotFoundError, ProcessLookupError):
        return 0


if __name__ == "__main__":
    main()
