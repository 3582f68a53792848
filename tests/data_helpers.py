"""Archives and checksums for the tests of corpora."""

import gzip
import hashlib
import lzma
import zipfile


def sha(data):
    return hashlib.sha256(data).hexdigest()


def pack(path, name, data):
    """Write data to path, packed as the path's ending says."""
    if path.suffix == ".zip":
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr(name, data)
    else:
        path.write_bytes({".gz": gzip.compress, ".xz": lzma.compress}.get(path.suffix, bytes)(data))
    return path
