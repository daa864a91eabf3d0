"""The page in a real browser: no console errors, usable from a keyboard, readable at phone width.

Skipped with the reason where playwright or Chromium is missing. ``--screenshots FOLDER --page-url URL`` takes
the pictures of docs/images from a running server.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import msgspec
import numpy as np
import pytest

from interlock.engine.messages import PhaseLoad, RankLoad, SchedulerStats, TransferStats
from interlock.options import Options
from interlock.plan.resolve import resolve
from interlock.server.app import create_app
from interlock.server.page_router import POLICY, load_assets
from interlock.server.settings import ServerSettings
from interlock.tokenizer import Tokenizer
from tests.plan.machines import machine, tiny_card
from tests.server.fake_engine import FakeEngine
from tests.server.live import live_server

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome-headless-shell")
WAIT_MS = 30_000


def planned_engine() -> FakeEngine:
    """An engine with a plan that a planner made, and a minute of load on two ranks."""
    options = Options.of(model="tiny", tp_size=2, moe_a2a_backend="collective", max_model_len=512)
    engine = FakeEngine(plan=resolve(options, tiny_card(vocab_size=576), machine()))
    engine.extra_stats = SchedulerStats(
        running=3, waiting=1, full_pages=100, full_pages_free=40, full_pages_cached=20
    )
    dice = np.random.default_rng(0)
    for rank in range(2):
        phase = PhaseLoad(
            capacity=64,
            steps=10,
            tokens=160,
            most_tokens=20,
            dispatch_seconds=0.03,
            dispatch_calls=30,
            combine_seconds=0.06,
            combine_calls=30,
            rows=dice.integers(0, 50, (3, 4)).astype("<i8").tobytes(),
        )
        engine.history.note_rank(
            RankLoad(
                rank=rank,
                layers=(1, 2, 3),
                first_expert=4 * rank,
                experts=4,
                is_slice=False,
                sample_every=8,
                prefill=phase,
                decode=phase,
            )
        )
    engine.history.note_stats([engine.extra_stats])
    return engine


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    path = next(filter(None, map(shutil.which, BROWSERS)), None)
    if path is None:
        pytest.skip(f"no Chromium on PATH (looked for {', '.join(BROWSERS)})")
    arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
    with playwright.sync_playwright() as driver:
        opened = driver.chromium.launch(executable_path=path, args=arguments)
        yield opened
        opened.close()


@pytest.fixture(scope="module")
def url(tokenizer: Tokenizer) -> Iterator[str]:
    engine = planned_engine()
    engine.script("a signal says go", delay=0.002)
    with live_server(create_app(engine, tokenizer, ServerSettings(model_names=("tiny",)))) as address:
        yield address


Open = Callable[..., Any]


@pytest.fixture
def open_page(browser: Any) -> Iterator[Open]:
    """``open_page(url, width=..., scheme=...)``; at the end no page may have written to the console."""
    said: list[str] = []
    with ExitStack() as stack:

        def start(address: str, *, width: int = 1280, scheme: str = "light") -> Any:
            context = browser.new_context(color_scheme=scheme, viewport={"width": width, "height": 844})
            stack.callback(context.close)
            page = context.new_page()
            page.set_default_timeout(WAIT_MS)
            page.on("console", lambda message: said.append(f"{message.type}: {message.text}"))
            page.on("pageerror", lambda error: said.append(f"error: {error}"))
            page.on("requestfailed", lambda request: said.append(f"failed: {request.url}"))
            page.goto(address)
            return page

        yield start
    assert said == []


def ready(page: Any) -> Any:
    page.wait_for_selector("#lamp[data-state=ready]")
    page.locator("#tile-running", has_text="3 /").wait_for()
    return page


def test_every_file_is_served_under_the_policy(http: httpx.Client) -> None:
    for name, asset in load_assets().items():
        answer = http.get("/" if name == "index.html" else f"/page/{name}")
        assert answer.status_code == 200
        assert answer.headers["content-security-policy"] == POLICY
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.content == asset.content
        again = http.get(f"/page/{name}", headers={"If-None-Match": answer.headers["etag"]})
        assert (again.status_code, again.content) == (304, b"")
        assert b"http://" not in asset.content.replace(b"http://www.w3.org/", b"")
        assert b"https://" not in asset.content
    for path in ("/page/", "/page/x.js", "/page/..%2fapp.py", "/page/../app.py", "/page/%2e%2e/app.py"):
        assert http.get(path).status_code == 404


def test_ask_and_look_at_tokens_with_the_keyboard_only(open_page: Open, url: str) -> None:
    page = ready(open_page(url))
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Skip to content"
    for _ in range(20):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.id") == "prompt":
            break
    assert page.evaluate("document.activeElement.id") == "prompt"
    page.keyboard.press("Control+A")
    page.keyboard.type("go?")
    page.keyboard.press("Control+Enter")
    page.locator("#answer-note", has_text="ended by stop").wait_for()
    assert page.locator("#answer").text_content().startswith("a signal says go")
    for _ in range(8):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.classList.contains('token')"):
            break
    for key, text in (("ArrowRight", " "), ("ArrowRight", "s"), ("End", "</s>"), ("Home", "a")):
        page.keyboard.press(key)
        if text != "</s>":
            assert page.evaluate("document.activeElement.textContent") == text
        assert page.locator("#alternatives .choice").count() >= 5


def test_the_completion_mode_shows_the_same(open_page: Open, url: str) -> None:
    page = ready(open_page(url))
    page.check("input[value=completion]", force=True)
    assert page.locator("#system-field").is_hidden()
    page.fill("#max-tokens", "5")
    page.click("#send")
    page.locator("#answer-note", has_text="ended by length").wait_for()
    assert page.locator("#answer .token").count() == 5


def test_tabs_follow_arrow_keys_and_show_what_the_server_says(open_page: Open, url: str) -> None:
    page = ready(open_page(url))
    page.focus("#tab-try")
    page.keyboard.press("ArrowRight")
    page.wait_for_selector("#view-load:not([hidden]) #replicas tbody tr")
    assert "40 used, 20 cached of 100" in page.locator("#replicas").text_content()
    page.keyboard.press("ArrowRight")
    page.wait_for_selector("#view-experts:not([hidden]) #ranks tbody tr:nth-child(2)")
    assert "1.00 ms" in page.locator("#ranks").text_content()
    page.focus("#heat")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowDown")
    assert page.locator("#heat-note").text_content().startswith("Layer 2, expert 1 on rank 0:")
    for _ in range(4):
        page.keyboard.press("ArrowRight")
    assert "expert 5 on rank 1" in page.locator("#heat-note").text_content()
    page.focus("#tab-experts")
    page.keyboard.press("End")
    assert page.evaluate("location.hash") == "#plan"
    row = page.locator("#items tr.item", has_text="moe_a2a_backend")
    assert "collective" in row.text_content()
    assert "you" in row.text_content()
    assert "receipts differ" in page.locator("#verdict").text_content()
    page.fill("#filter", "page_size")
    assert page.locator("#items tr.item:visible").count() == 1


def test_themes(open_page: Open, url: str) -> None:
    """The system's scheme until one is chosen; the choice stays."""

    def background(page: Any) -> str:
        return str(page.evaluate("getComputedStyle(document.body).backgroundColor"))

    dark, light = (ready(open_page(url, scheme=scheme)) for scheme in ("dark", "light"))
    assert background(dark) != background(light)
    light.focus("#theme")
    light.keyboard.press("Enter")
    light.keyboard.press("Enter")
    assert light.get_attribute("#theme", "aria-label") == "Theme: dark"
    assert background(light) == background(dark)
    light.reload()
    ready(light)
    assert background(light) == background(dark)


@pytest.mark.parametrize("width", [320, 390])
def test_nothing_overflows_at_phone_width(open_page: Open, url: str, width: int) -> None:
    page = ready(open_page(url, width=width))
    for name in ("try", "load", "experts", "plan"):
        page.click(f"#tab-{name}")
        page.wait_for_timeout(50)
        assert page.evaluate("document.documentElement.scrollWidth") <= width, name
    smallest = page.evaluate(
        "Math.min(...[...document.querySelectorAll('td, p, label, button')]"
        ".filter((e) => e.offsetParent).map((e) => parseFloat(getComputedStyle(e).fontSize)))"
    )
    assert smallest >= 11


def test_the_key_is_asked_for_and_used(open_page: Open, tokenizer: Tokenizer) -> None:
    engine = planned_engine()
    settings = ServerSettings(model_names=("tiny",), api_key="s3cret")
    with live_server(create_app(engine, tokenizer, settings)) as address:
        page = open_page(address)
        page.wait_for_selector("#key-form:not([hidden])")
        assert page.evaluate("document.activeElement.id") == "key"
        page.keyboard.type("s3cret")
        page.keyboard.press("Enter")
        ready(page)
        assert page.locator("#key-form").is_hidden()
        page.reload()
        ready(page)
        assert page.evaluate("localStorage.getItem('interlock-key')") is None
        page.context.close()


def test_an_error_of_the_server_is_shown_as_text(open_page: Open, tokenizer: Tokenizer) -> None:
    """What the server says is never taken for markup."""
    engine = planned_engine()
    engine.script("<img src=x onerror=alert(1)>")
    with live_server(create_app(engine, tokenizer, ServerSettings(model_names=("tiny",)))) as address:
        page = ready(open_page(address))
        page.click("#send")
        page.locator("#answer-note", has_text="ended by stop").wait_for()
        assert page.locator("#answer").text_content().startswith("<img src=x onerror=alert(1)>")
        assert page.locator("#answer img").count() == 0
        page.context.close()


def test_screenshots(browser: Any, request: pytest.FixtureRequest) -> None:
    """Pictures for the docs, of the server at ``--page-url``."""
    folder, address = request.config.getoption("--screenshots"), request.config.getoption("--page-url")
    if folder is None or address is None:
        pytest.skip("asked for with --screenshots FOLDER --page-url URL")
    image = pytest.importorskip("PIL.Image", reason="Pillow makes the pictures small")
    target = Path(folder)

    def shoot(name: str, tab: str, *, width: int = 1180, height: int = 760, scheme: str = "light") -> None:
        context = browser.new_context(color_scheme=scheme, viewport={"width": width, "height": height})
        page = context.new_page()
        page.goto(f"{address}/#{tab}")
        page.wait_for_selector("#lamp[data-state=ready]")
        if tab == "try":
            page.fill("#max-tokens", "80")
            page.fill("#seed", "7")
            page.click("#send")
            page.locator("#answer-note", has_text="ended by").wait_for()
            page.focus("#answer .token")
            for _ in range(4):
                page.keyboard.press("ArrowRight")
        page.wait_for_timeout(3500)
        path = target / f"page_{name}.png"
        page.screenshot(path=path)
        image.open(path).convert("RGB").quantize(128).save(path, optimize=True)
        context.close()

    shoot("try", "try")
    shoot("load", "load")
    shoot("experts_dark", "experts", scheme="dark")
    shoot("plan", "plan")
    shoot("plan_phone", "plan", width=390, height=780)


def test_transfers_are_shown_where_there_are_any(open_page: Open, tokenizer: Tokenizer, url: str) -> None:
    page = ready(open_page(url))
    page.get_by_role("tab", name="Load").click()
    page.locator("#replicas tbody tr").first.wait_for()
    assert page.locator("#transfers").is_hidden()
    engine = planned_engine()
    transfer = TransferStats(
        role="prefill",
        states={"sending": 2},
        peers=1,
        pages_held=30,
        pages_quarantined=4,
        bytes_total=3 * 10**9,
        seconds_total=1.5,
    )
    engine.extra_stats = msgspec.structs.replace(engine.extra_stats, transfer=transfer)
    with live_server(create_app(engine, tokenizer, ServerSettings(model_names=("tiny",)))) as address:
        page = ready(open_page(address))
        page.get_by_role("tab", name="Load").click()
        row = page.locator("#transfers tbody tr")
        row.wait_for()
        assert row.locator("td").all_inner_texts()[1:5] == ["1", "2 sending", "30, 4 of ended requests", "0"]
        assert row.locator("td").last.inner_text() == "2000"
