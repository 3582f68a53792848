"""The name by which `pg19/build.py` imports `console.bytes_read`.

That file is hashed into builds: changed by a byte, it would build every book anew. So its imports stay as they are.
"""

from compressive.console import bytes_read as progress

__all__ = ["progress"]
