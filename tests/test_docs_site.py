"""The documentation site builds strictly, every page is in its navigation, and every link and picture has a target."""

import importlib.util
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

ROOT = Path(__file__).parent.parent


def staging():
    spec = importlib.util.spec_from_file_location("docs_site", ROOT / "tools" / "docs_site.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Page(HTMLParser):
    """Collects what a page refers to, and the names that others may refer to."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.targets: list[str] = []
        self.names: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        for name, value in attrs:
            if name in ("href", "src") and value:
                self.targets.append(value)
            if name in ("id", "name") and value:
                self.names.add(value)


@pytest.mark.slow
def test_the_site_builds_and_nothing_in_it_is_missing(tmp_path):
    shutil.copyfile(ROOT / "mkdocs.yml", tmp_path / "mkdocs.yml")
    (tmp_path / "src").symlink_to(ROOT / "src")
    staging().stage(ROOT, tmp_path / "build" / "site-source")
    builder = Path(sys.executable).with_name("zensical")
    done = subprocess.run(
        [builder, "build", "-f", "mkdocs.yml", "--strict"], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    site = tmp_path / "build" / "site"
    pages = {path: Page(path.read_text("utf-8")) for path in site.rglob("*.html") if path.name != "404.html"}
    missing = []
    for path, page in pages.items():
        for target in page.targets:
            address = urlsplit(target)
            if address.scheme or address.netloc:
                assert not target.endswith((".js", ".css")), f"{path.name} loads {target} from another host"
                continue
            file = (path.parent / unquote(address.path)).resolve() if address.path else path
            if not file.exists():
                missing.append(f"{path.name}: {target}")
            elif address.fragment and file in pages and unquote(address.fragment) not in pages[file].names:
                missing.append(f"{path.name}: {target}, no such anchor")
    assert missing == []
    api = (site / "api.html").read_text("utf-8")
    assert 'id="compressive.config.model.ModelConfig.compression_rate"' in api
    assert "Memories compressed into one" in api


def test_every_page_is_in_the_navigation():
    nav = (ROOT / "mkdocs.yml").read_text("utf-8").split("\nnav:\n")[1]
    listed = re.findall(r": ([\w-]+\.md)$", nav, re.MULTILINE)
    pages = {path.name for path in (ROOT / "docs").glob("*.md")} | set(staging().PAGES.values())
    assert sorted(listed) == sorted(pages)


def test_links_are_turned_pictures_link_to_themselves_and_a_link_without_a_target_is_named(tmp_path):
    module = staging()
    (tmp_path / "docs").mkdir()
    for name in module.PAGES:
        (tmp_path / name).write_text("# A page\n", "utf-8")
    page = tmp_path / "docs" / "a.md"
    (tmp_path / "docs" / "b.md").write_text("# Page B\n", "utf-8")
    links = "[there](../data.json), [a page](../CHANGELOG.md#a-page), [far](https://example.org), [b.md](b.md#page-b)\n"
    page.write_text(links, "utf-8")
    (tmp_path / "data.json").write_text("{}", "utf-8")
    module.stage(tmp_path, tmp_path / "out")
    text = (tmp_path / "out" / "a.md").read_text("utf-8")
    far = "[far](https://example.org)"
    assert text == f"[there](files/data.json), [a page](changelog.md#a-page), {far}, [Page B](b.md#page-b)\n"
    assert (tmp_path / "out" / "files" / "data.json").read_text("utf-8") == "{}"
    page.write_text("Some text\n\n![a picture](../picture.png)\n\nand ![inline](../picture.png)\n", "utf-8")
    (tmp_path / "picture.png").write_bytes(b"")
    module.stage(tmp_path, tmp_path / "out")
    picture = "![a picture](files/picture.png)"
    text = (tmp_path / "out" / "a.md").read_text("utf-8")
    assert text == f"Some text\n\n[{picture}](files/picture.png)\n\nand ![inline](files/picture.png)\n"
    page.write_text("[gone](../gone.json)\n", "utf-8")
    with pytest.raises(FileNotFoundError, match=r"docs/a\.md: the link to \.\./gone\.json has no target"):
        module.stage(tmp_path, tmp_path / "out")
