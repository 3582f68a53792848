"""Trained models that are part of the package, by name: `compressive generate enwik8-small`.

Each is a release (see `export.py`) in `shipped/NAME/`, with a card, README.md, and an excerpt of its corpus, so that it
can be scored where the corpus itself is not prepared.
"""

from pathlib import Path

SHIPPED = Path(__file__).parent.parent / "shipped"
"""Folder of the models."""
EXCERPT = "excerpt"
"""Folder of a release: a part of its corpus, prepared like a corpus."""


def shipped(source: str | Path) -> Path:
    """Return the folder of a shipped model for its name, and any other path as it is; an existing folder wins."""
    folder = Path(source)
    named = SHIPPED / folder
    return named if folder.name == str(folder) and not folder.exists() and named.is_dir() else folder


def spelled(folder: Path) -> str:
    """Return what a user calls a folder: a shipped model by its name, any other by its path."""
    return folder.name if folder.parent == SHIPPED else str(folder)


def shipped_names() -> list[str]:
    """Return the names of all shipped models."""
    return sorted(path.parent.name for path in SHIPPED.glob("*/config.json"))
