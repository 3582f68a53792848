"""Stage the pages of the documentation site, for Zensical to build: `make docs` runs both.

    python tools/docs_site.py build/site-source

The pages of docs/ link to files outside it, such as results and examples. On the site these links need a target, so
every such file is copied to files/ and the link turned to it. CHANGELOG.md and CONTRIBUTING.md become pages. A picture
in a paragraph of its own links to itself, so that it can be opened at full size. A link to a page that is labelled with
the page's file name is labelled with its title.
"""

import re
import shutil
import sys
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGES = {"CHANGELOG.md": "changelog.md", "CONTRIBUTING.md": "contributing.md"}
"""Pages from outside docs/, and their names on the site."""
ADDED = ("site.css", "site.js")
"""What the site adds to the theme."""
_LINK = re.compile(r"""(\]\(|<img src=")([^)#\s"]+)(#[^)\s"]*)?([)"])""")
_ADDRESS = re.compile(r"^[a-z]+:")
_LABEL = re.compile(r"\[(?:docs/)?[\w-]+\.md\](?=\(([\w-]+\.md)[)#])")
_PICTURE = re.compile(r"^( *)(!\[[^\]]*\]\((\S+)\))$", re.MULTILINE)


def stage(root: Path, out: Path) -> None:
    """Write the pages and all that they link to into the folder `out`, which is replaced.

    Raises FileNotFoundError for a link without a target, ValueError for one that leaves the repository.
    """
    shutil.rmtree(out, ignore_errors=True)
    pages = {path: Path(path.name) for path in sorted((root / "docs").glob("*.md"))}
    pages |= {root / name: Path(page) for name, page in PAGES.items()}
    titles = {
        str(page): source.read_text("utf-8").split("\n", 1)[0].removeprefix("# ") for source, page in pages.items()
    }
    out.mkdir(parents=True)
    for name in ADDED:
        if (added := root / "docs" / name).is_file():
            shutil.copyfile(added, out / name)
    for source, page in pages.items():
        turned = partial(_turned, source=source, root=root, out=out, pages=pages)
        text = _LINK.sub(turned, source.read_text("utf-8"))
        text = _LABEL.sub(lambda label: f"[{titles[label[1]]}]", text)
        (out / page).write_text(_PICTURE.sub(r"\1[\2](\3)", text), "utf-8")


def _turned(link: re.Match[str], source: Path, root: Path, out: Path, pages: dict[Path, Path]) -> str:
    begin, target, anchor, end = link.groups()
    if _ADDRESS.match(target):
        return link[0]
    path = (source.parent / target).resolve()
    if not path.exists():
        raise FileNotFoundError(f"{source.relative_to(root)}: the link to {target} has no target")
    if path in pages:
        return f"{begin}{pages[path]}{anchor or ''}{end}"
    if not path.is_relative_to(root):
        raise ValueError(f"{source.relative_to(root)}: the link to {target} leaves the repository")
    inside = path.relative_to(root / "docs") if path.is_relative_to(root / "docs") else "files" / path.relative_to(root)
    if path.is_dir():
        (out / inside).mkdir(parents=True, exist_ok=True)
        listed = sorted(entry for entry in path.iterdir() if entry.is_file())
        index = [f"# {path.name}", "", *(f"- [{entry.name}]({entry.name})" for entry in listed)]
        (out / inside / "index.md").write_text("\n".join(index) + "\n", "utf-8")
        for entry in listed:
            shutil.copyfile(entry, out / inside / entry.name)
        return f"{begin}{inside.as_posix()}/index.md{end}"
    (out / inside).parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(path, out / inside)
    return f"{begin}{inside.as_posix()}{anchor or ''}{end}"


if __name__ == "__main__":
    stage(ROOT, Path(sys.argv[1]))
