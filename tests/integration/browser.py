"""Debian's Chromium, driven by Playwright, for tests of the dashboard's page.

`Tab` is a page that fails its test if the browser reports an error: an exception, a message on the console, a refused
request. It keeps screenshots under `.build/screenshots`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, ConsoleMessage, Dialog, Page, Response, expect, sync_playwright

SCREENSHOTS = Path(__file__).parents[2] / ".build" / "screenshots"
Theme = Literal["light", "dark"]
DESKTOP, PHONE = (1280, 800), (390, 844)
TIMEOUT_MS = 30_000
AXE = Axe()
expect.set_options(timeout=TIMEOUT_MS)


@pytest.fixture(scope="module")
def browser(requires_service: Callable[..., Path]) -> Iterator[Browser]:
    """One browser for all tests of a file; each test opens its own context, with its own cookies."""
    program = requires_service("chromium")
    with sync_playwright() as playwright:
        # Chromium refuses its sandbox to root, as whom containers run.
        options = ["--no-sandbox", "--disable-dev-shm-usage", "--force-prefers-reduced-motion"]
        browser = playwright.chromium.launch(executable_path=program, args=options)
        try:
            yield browser
        finally:
            browser.close()


class Tab:
    def __init__(self, page: Page, url: str) -> None:
        self.page = page
        self.url = url
        self.problems: list[str] = []
        self.expected: list[str] = []
        """Patterns of problems that a test causes on purpose."""
        page.on("console", self._console)
        page.on("pageerror", lambda error: self.problems.append(f"exception: {error}"))
        page.on("response", self._response)
        page.on("dialog", self._dialog)

    def open(self, path: str = "/", **query: str) -> Page:
        """Open a view and wait until it is loaded. Its heading is the last thing to wait for: the stream never ends."""
        words = "&".join(f"{name}={value}" for name, value in query.items())
        self.page.goto(f"{self.url}{path}{'?' if words else ''}{words}", wait_until="load")
        self.page.locator("h1").first.wait_for()
        expect(self.page.locator(".loading")).to_have_count(0, timeout=TIMEOUT_MS)
        return self.page

    def shoot(self, name: str) -> None:
        SCREENSHOTS.mkdir(parents=True, exist_ok=True)
        self.page.screenshot(path=SCREENSHOTS / f"{name}.png")

    def violations(self) -> list[str]:
        """Return what axe finds wrong, one line per rule and element."""
        found: list[dict[str, Any]] = AXE.run(self.page).response["violations"]
        return [f"{rule['id']}: {node['target']} {node['html'][:160]}" for rule in found for node in rule["nodes"]]

    def overflow_px(self) -> int:
        """Return by how much the page is wider than the window."""
        return int(self.page.evaluate("document.documentElement.scrollWidth - window.innerWidth"))

    def heap_bytes(self) -> int:
        """Return what the page's scripts hold, after a garbage collection."""
        session = self.page.context.new_cdp_session(self.page)
        session.send("HeapProfiler.collectGarbage")
        used = int(session.send("Runtime.getHeapUsage")["usedSize"])
        session.detach()
        return used

    def check(self) -> None:
        unexpected = [each for each in self.problems if not any(re.search(one, each) for one in self.expected)]
        assert not unexpected, unexpected

    def _console(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            self.problems.append(f"console {message.type}: {message.text}")

    def _dialog(self, dialog: Dialog) -> None:
        self.problems.append(f"dialog: {dialog.message}")
        dialog.dismiss()

    def _response(self, response: Response) -> None:
        if response.status >= 400:
            self.problems.append(f"HTTP {response.status}: {response.url}")


@contextmanager
def tab(
    browser: Browser, url: str, *, theme: Theme = "light", size: tuple[int, int] = DESKTOP, is_phone: bool = False
) -> Iterator[Tab]:
    width, height = size
    context = browser.new_context(
        viewport={"width": width, "height": height}, color_scheme=theme, has_touch=is_phone, reduced_motion="reduce"
    )
    context.set_default_timeout(TIMEOUT_MS)
    opened = Tab(context.new_page(), url)
    try:
        yield opened
        opened.check()
    finally:
        context.close()
