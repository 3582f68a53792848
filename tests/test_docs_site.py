"""The documentation site builds strictly, every page is in its navigation, and every link and picture has a target.

In a real browser every page fits a narrow screen and keeps the text of its code blocks, loads nothing from elsewhere,
and search works.
"""

import importlib.util
import re
import shutil
import subprocess
import sys
import threading
from functools import partial
from html.parser import HTMLParser
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

ROOT = Path(__file__).parent.parent
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
BUILD = ["build", "-f", "mkdocs.yml", "--strict"]


def staging():
    spec = importlib.util.spec_from_file_location("docs_site", ROOT / "tools" / "docs_site.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Page(HTMLParser):
    """Collects what a page refers to, what of it is loaded with the page, and the names that others may refer to."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.targets: list[str] = []
        self.loaded: list[str] = []
        self.names: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        for name, value in attrs:
            if name in ("href", "src") and value:
                self.targets.append(value)
                if tag != "a":
                    self.loaded.append(value)
            if name in ("id", "name") and value:
                self.names.add(value)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The site, built as by `make docs`."""
    folder = tmp_path_factory.mktemp("docs")
    shutil.copyfile(ROOT / "mkdocs.yml", folder / "mkdocs.yml")
    (folder / "src").symlink_to(ROOT / "src")
    staging().stage(ROOT, folder / "build" / "site-source")
    builder = Path(sys.executable).with_name("zensical")
    done = subprocess.run([builder, *BUILD], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "build" / "site"


def test_the_site_is_built_as_by_make():
    makefile = (ROOT / "Makefile").read_text("utf-8")
    assert f"\t$(BIN)/python tools/docs_site.py build/site-source\n\t$(BIN)/zensical {' '.join(BUILD)}\n" in makefile


@pytest.mark.slow
def test_nothing_in_the_site_is_missing(site):
    pages = {path: Page(path.read_text("utf-8")) for path in site.rglob("*.html") if path.name != "404.html"}
    missing = []
    for path, page in pages.items():
        for target in page.loaded:
            address = urlsplit(target)
            assert not address.scheme, f"{path.name} loads {target} from another host"
            assert not address.netloc, f"{path.name} loads {target} from another host"
        for target in page.targets:
            address = urlsplit(target)
            if address.scheme or address.netloc:
                continue
            file = (path.parent / unquote(address.path)).resolve() if address.path else path
            if not file.exists():
                missing.append(f"{path.name}: {target}")
            elif address.fragment and file in pages and unquote(address.fragment) not in pages[file].names:
                missing.append(f"{path.name}: {target}, no such anchor")
    assert missing == []


@pytest.mark.slow
def test_the_api_page_has_inherited_methods_fields_and_the_values_of_options(site):
    text = (site / "api.html").read_text("utf-8")
    names = Page(text).names
    for name in ("load", "TextModel.generate", "TextState.save", "CompressiveLM.forward", "Memory.reset"):
        assert f"compressive.{name}" in names
    assert "compressive.ModelConfig.compression_rate" in names
    assert "compressive.model.language_model.LMOutput.nll" in names
    assert "Memories compressed into one" in text
    plain = re.sub(r"<[^>]*>", "", text).replace("&quot;", '"')
    assert re.search(r'Compression = Literal\[\s*"max",\s*"mean",', plain)


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no chromium: apt-get install chromium, or another browser of its kind")
def test_pages_fit_a_narrow_screen_load_nothing_from_elsewhere_and_search_works(site):
    playwright = pytest.importorskip("playwright.sync_api", reason="no Playwright: pip install -e '.[dev]'")
    handler = partial(Quiet, directory=site)
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server, playwright.sync_playwright() as started:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_address[1]}/"
        browser = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page(viewport={"width": 390, "height": 844}, color_scheme="dark")
        wrong: list[str] = []
        page.on("pageerror", lambda error: wrong.append(f"{page.url}: {error}"))
        page.on("console", lambda note: wrong.append(f"{page.url}: {note.text}") if note.type == "error" else None)
        page.on("request", lambda request: wrong.append(request.url) if request.url.startswith("http") and not
                request.url.startswith(address) else None)  # fmt: skip
        for path in sorted(site.glob("*.html")):
            page.goto(address + path.name)
            if path.name == "404.html":
                continue
            wide, pictures = page.evaluate(
                """() => [document.documentElement.scrollWidth - window.innerWidth,
                          [...document.images].filter((i) => i.complete && !i.naturalWidth).map((i) => i.src)]"""
            )
            assert wide <= 0, f"{path.name} is {wide} pixels wider than the screen"
            assert pictures == [], path.name
            changed = page.evaluate(
                """async () => {
                  const source = await (await fetch(location.pathname)).text();
                  const words = (root) => [...root.querySelectorAll(".md-typeset pre > code")].map((code) =>
                    code.textContent.trim().split(/\\s+/).sort().join(" "));
                  const [plain, shown] = [new DOMParser().parseFromString(source, "text/html"), document].map(words);
                  return plain.filter((text, i) => text !== shown[i]);
                }"""
            )
            assert changed == [], path.name
        page.goto(address + "usage.html")
        first = page.locator(".language-sh code").first.inner_text().split("\n")
        assert first[0].startswith("# "), "a comment that does not fit beside its command is above it"
        page.locator(".md-header__button[for=__search]").click()
        page.keyboard.type("compression_rate")
        page.get_by_role("option").first.click()
        page.wait_for_url("**/api.html*compression_rate*")
        browser.close()
        server.shutdown()
    assert wrong == []


class Quiet(SimpleHTTPRequestHandler):
    """Serves the site, without a line for each request."""

    def log_message(self, *_: object) -> None:
        pass


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
    (tmp_path / "CONTRIBUTING.md").write_text("# A page\n\n[docs/b.md](docs/b.md)\n", "utf-8")
    page.write_text(links, "utf-8")
    (tmp_path / "data.json").write_text("{}", "utf-8")
    module.stage(tmp_path, tmp_path / "out")
    text = (tmp_path / "out" / "a.md").read_text("utf-8")
    far = "[far](https://example.org)"
    assert text == f"[there](files/data.json), [a page](changelog.md#a-page), {far}, [Page B](b.md#page-b)\n"
    assert (tmp_path / "out" / "contributing.md").read_text("utf-8") == "# A page\n\n[Page B](b.md)\n"
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
