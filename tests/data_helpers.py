"""Archives and checksums for the tests of corpora, and jobs that worker processes can import."""

import gzip
import hashlib
import lzma
import os
import time
import zipfile
from collections.abc import Callable


def sha(data):
    return hashlib.sha256(data).hexdigest()


def pack(path, name, data):
    """Write data to a path, compressed according to its extension."""
    if path.suffix == ".zip":
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr(name, data)
    else:
        compressors: dict[str, Callable[[bytes], bytes]] = {".gz": gzip.compress, ".xz": lzma.compress}
        path.write_bytes(compressors.get(path.suffix, bytes)(data))
    return path


def negative(job):
    time.sleep(0.02 * (job % 3 == 0))  # later jobs finish earlier
    if job == 7:
        raise ValueError("job 7 cannot be done")
    return -job


def die(job):
    os._exit(3)


def note_begin():
    os.environ["BEGUN"] = "yes"


def has_begun(job):
    return os.environ.get("BEGUN")
