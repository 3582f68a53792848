"""Download one file: resumable, checked by SHA-256, renamed into place when complete."""

import hashlib
import http.client
import os
import re
import time
import urllib.error
import urllib.request
from pathlib import Path

from compressive.console import bytes_read, note

ATTEMPTS = 5
PAUSE = 1.0  # seconds before the second attempt; doubles with each further one
TIMEOUT = 60.0
BLOCK = 1 << 18

# Some hosts, such as WikiText's, refuse urllib's default user agent.
AGENT = "compressive"


class DownloadError(RuntimeError):
    """A download failed; the message says what to do."""


def download(url: str, path: Path, sha256: str) -> Path:
    """Download `url` to `path`, unless `path` already has this SHA-256; return `path`.

    Partial data is kept in a `.part` file beside it, which is renamed after the check. Raises DownloadError.
    """
    if path.exists():
        if (found := sha256_of(path)) == sha256:
            return path
        note(f"{path} has SHA-256 {found}, expected {sha256}: downloading it again")
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    _fetch(url, path, part)
    if (found := sha256_of(part)) != sha256:
        part.unlink()  # resuming would give the same file
        raise DownloadError(
            f"{url} gave a file with SHA-256 {found}, expected {sha256}: it was removed; run again, or download it "
            f"elsewhere and put it at {path}"
        )
    part.replace(path)
    return path


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class _BrokenOffError(Exception):
    """The transfer ended early; another attempt may resume it."""


def _fetch(url: str, path: Path, part: Path) -> None:
    """Complete `part`, in up to `ATTEMPTS` attempts."""
    begun = _size(part)
    for attempt in range(ATTEMPTS):
        if attempt:
            time.sleep(PAUSE * 2 ** (attempt - 1))
        try:
            return _transfer(url, part)
        except urllib.error.HTTPError as error:
            error.close()
            if error.code < 500:
                raise DownloadError(
                    f"{url} answered {error.code} {error.reason}: download {path.name} elsewhere and put it at {path}, "
                    "or give it with --source"
                ) from error
            reason = f"the server answered {error.code} {error.reason}"
        except (_BrokenOffError, http.client.HTTPException, OSError) as error:
            if isinstance(error, urllib.error.URLError) and _size(part) == begun:
                raise DownloadError(
                    f"cannot reach {url} ({error.reason}): download {path.name} on another machine "
                    f"and put it at {path}, or give it with --source"
                ) from error
            reason = str(error) or type(error).__name__
    raise DownloadError(
        f"{url} broke off {ATTEMPTS} times, last because {reason}: {_size(part):,} bytes are in {part}; "
        "run again to resume"
    )


def _transfer(url: str, part: Path) -> None:
    """Make one attempt: append the missing bytes to `part`."""
    have = _size(part)
    headers = {"User-Agent": AGENT} | ({"Range": f"bytes={have}-"} if have else {})
    try:
        answer = urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=TIMEOUT)
    except urllib.error.HTTPError as error:
        if not (have and error.code == http.HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE):
            raise
        error.close()
        if error.headers.get("Content-Range", "").endswith(f"/{have}"):
            return  # complete: an earlier run ended before the check
        part.unlink()
        raise _BrokenOffError("the .part file was longer than the file, and was removed") from error
    with answer:
        resumed = answer.status == http.HTTPStatus.PARTIAL_CONTENT
        if resumed and not re.match(rf"bytes {have}-", answer.headers.get("Content-Range", "")):
            raise _BrokenOffError(
                f"the server gave the range {answer.headers.get('Content-Range')!r}, asked from {have}"
            )
        start = have if resumed else 0  # a server without range support sends the whole file
        length = answer.headers.get("Content-Length")
        total = None if length is None else start + int(length)
        with part.open("ab" if resumed else "wb") as file, bytes_read(part.stem, total, start) as advance:
            while block := answer.read(BLOCK):
                file.write(block)
                advance(len(block))
            file.flush()
            os.fsync(file.fileno())
            if total is not None and file.tell() < total:
                raise _BrokenOffError(f"only {file.tell():,} of {total:,} bytes arrived")


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0
