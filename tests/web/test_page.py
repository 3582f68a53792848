"""The page in a real browser: type, write, choose by keyboard, fork, compare; narrow and dark."""

import re
import shutil

import pytest
from web_helpers import serving, tiny_model

from compressive.web.server import Server

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FLAGS = [
    "--no-sandbox", "--headless", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
]  # fmt: skip
PROMPT = "It was the best of times, it was the worst of times"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        CHROMIUM is None, reason="no chromium: apt-get install chromium, or another browser of its kind"
    ),
]


@pytest.fixture(scope="module")
def browser():
    playwright = pytest.importorskip("playwright.sync_api", reason="no Playwright: pip install -e '.[dev]'")
    with playwright.sync_playwright() as started:
        launched = started.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield launched
        launched.close()


@pytest.fixture(scope="module")
def address():
    with serving(Server(tiny_model(), "tiny")) as served:
        yield served


def is_wrong(message):
    """A request that the server refuses is logged too; the page shows its message."""
    return message.type == "error" and "the server responded with a status of 400" not in message.text


@pytest.fixture
def visit(browser, address):
    """Open the page in a fresh context; nothing may go wrong in it."""
    contexts, wrong = [], []

    def go(**options):
        context = browser.new_context(**options)
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(8000)
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("console", lambda message: wrong.append(message.text) if is_wrong(message) else None)
        page.goto(address)
        return page

    yield go
    for context in contexts:
        context.close()
    assert not wrong


def test_a_visit(visit):
    page = visit(viewport={"width": 1280, "height": 800})
    expect = pytest.importorskip("playwright.sync_api").expect
    status, panes = page.locator("#status"), page.locator(".pane")

    # Load and type.
    expect(page.locator("#model")).to_contain_text("tiny")
    page.get_by_label("Begin with a prompt").fill(PROMPT)
    page.get_by_role("button", name="Read only").click()
    expect(status).to_have_text("51 tokens read")
    text = page.get_by_role("listbox")
    assert text.inner_text() == PROMPT
    strip = page.get_by_role("application", name=re.compile("Memory of 2 layers: compressed slots filled 5 of 5"))
    strip.focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowDown")
    expect(page.locator(".hint")).to_have_text("Layer 2, compressed: tokens 26–27 “it”")
    expect(page.locator(".sum")).to_have_text("51 tokens read, 25 in memory or window, 26 forgotten")

    # Write, by the button and by a key.
    page.get_by_label("tokens", exact=False).fill("20")
    page.get_by_role("button", name="Continue", exact=True).click()
    expect(status).to_have_text("20 tokens written")
    expect(text.get_by_role("option")).to_have_count(71)
    text.focus()
    page.keyboard.press("Space")
    expect(text.get_by_role("option")).to_have_count(91)

    # Choose a token with the keyboard, and see where the model looked.
    page.keyboard.press("Home")
    expect(page.locator("#look")).to_contain_text("the first is not predicted")
    for _ in range(12):
        page.keyboard.press("ArrowRight")
    chosen = page.locator(".chosen")
    expect(chosen).to_have_attribute("data-n", "12")
    expect(text).to_have_attribute("aria-activedescendant", "text-1-12")
    expect(chosen).to_have_attribute("aria-label", re.compile(rf"^{PROMPT[12]}, [\d.]+ bits$"))
    expect(page.locator("#look-title")).to_contain_text("token 12 of text 1")
    heads = page.get_by_role("radiogroup").get_by_role("radio")
    expect(heads).to_have_count(4)
    page.keyboard.press("Enter")
    expect(page.locator("#look-title")).to_be_focused()
    heads.first.focus()
    page.keyboard.press("ArrowDown")
    expect(heads.nth(1)).to_have_attribute("aria-checked", "true")
    expect(page.locator("#look tbody tr")).to_have_count(10)
    page.keyboard.press("Escape")
    expect(text).to_be_focused()

    # Rewind is exact: what follows is what was there.
    before = text.get_by_role("option").all_text_contents()
    text.get_by_role("option").nth(70).dispatch_event("click")
    page.keyboard.press("r")
    expect(text.get_by_role("option")).to_have_count(71)
    page.get_by_role("button", name="Continue", exact=True).click()
    expect(text.get_by_role("option")).to_have_count(91)
    assert text.get_by_role("option").all_text_contents() == before

    # Fork, then compare side by side with other memory sizes.
    text.focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("f")
    expect(page.get_by_role("tab")).to_have_count(2)
    expect(panes.locator("h2")).to_contain_text("Text 2, from text 1 after 72 tokens")
    page.get_by_role("listbox").focus()
    page.keyboard.press("End")
    page.keyboard.press("c")
    expect(panes).to_have_count(2)
    expect(page.locator("#compared")).to_contain_text("The first 72 tokens are the same")
    right = panes.nth(1)
    right.locator("summary").click()
    right.get_by_label("Recent slots per layer").fill("4")
    right.get_by_label("Compressed slots per layer").fill("0")
    right.get_by_label("read the whole text again").check()
    right.get_by_role("button", name="Change memory").click()
    expect(status).to_have_text("Memory changed to 4 recent and 0 compressed slots per layer")
    expect(right.locator(".sum")).to_have_text("72 tokens read, 4 in memory or window, 68 forgotten")
    sums = re.findall(r"[\d.]+ bits|[\d.]+ on the right", page.locator("#compared").inner_text())
    assert sums[0].split()[0] != sums[1].split()[0]
    page.get_by_role("button", name="Continue both").click()
    expect(panes.nth(0).get_by_role("option")).to_have_count(92)
    expect(right.get_by_role("option")).to_have_count(92)

    # Edit the right one; a refusal is shown.
    right.get_by_role("option").nth(10).click()
    page.get_by_role("button", name="Edit from here").click()
    right.get_by_label("Text from here on").fill("something else")
    right.get_by_role("button", name="Replace").click()
    expect(right.get_by_role("option")).to_have_count(24)
    right.get_by_label("Recent slots per layer").fill("0")
    right.get_by_label("Compressed slots per layer").fill("3")
    right.get_by_role("button", name="Change memory").click()
    expect(page.get_by_role("alert")).to_contain_text("memory_size")


def test_a_long_text_is_stopped_and_found_again_after_a_reload(visit):
    page = visit(viewport={"width": 1280, "height": 800})
    expect = pytest.importorskip("playwright.sync_api").expect
    page.get_by_role("button", name="New text").click()
    page.get_by_label("Begin with a prompt").fill(PROMPT * 80)
    page.get_by_role("button", name="Read only").click()
    expect(page.locator("#status")).to_have_text("4080 tokens read")
    expect(page.get_by_role("listbox").get_by_role("option")).to_have_count(3000)
    page.get_by_role("button", name="Earlier text").click()
    expect(page.locator("[data-n='0']")).to_be_attached()
    page.get_by_label("tokens", exact=False).fill("10000")
    page.get_by_role("button", name="Continue", exact=True).click()
    page.get_by_role("button", name="Stop").click()
    expect(page.get_by_role("button", name="Continue", exact=True)).to_be_visible()
    expect(page.locator("#status")).to_have_text(re.compile(r"^Stopped after \d+ tokens$"))
    kept, shown = page.get_by_role("tab").count(), page.locator(".sum").inner_text()
    page.reload()
    expect(page.get_by_role("tab")).to_have_count(kept)
    expect(page.locator(".sum")).to_have_text(shown)


def test_an_editor_opens_with_all_of_a_long_text(visit):
    page = visit(viewport={"width": 1280, "height": 800})
    expect = pytest.importorskip("playwright.sync_api").expect
    page.get_by_role("button", name="New text").click()
    page.get_by_label("Begin with a prompt").fill(PROMPT * 90)
    page.get_by_role("button", name="Read only").click()
    expect(page.locator("#status")).to_have_text("4590 tokens read")
    page.get_by_role("button", name="Earlier text").click()
    page.locator("[data-n='3']").click()
    page.get_by_role("button", name="Edit from here").click()
    expect(page.get_by_label("Text from here on")).to_have_value((PROMPT * 90)[3:])


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_narrow_screens_need_no_scrolling_to_the_side(visit, scheme):
    page = visit(viewport={"width": 360, "height": 700}, color_scheme=scheme)
    expect = pytest.importorskip("playwright.sync_api").expect
    page.get_by_role("tab").first.click()
    page.get_by_role("listbox").get_by_role("option").nth(40).click()
    expect(page.get_by_role("radiogroup")).to_be_visible()
    page.locator("summary").click()
    assert page.evaluate("document.documentElement.scrollWidth") == 360
    dark = page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(20, 22, 26)"
    assert dark == (scheme == "dark")
