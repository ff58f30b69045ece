"""A page of a dashboard in headless Chromium: what it loads, when its first value is visible, and how fast it reacts.

All dashboards are measured by this file. It does not import Strata, because peers load it in their environment. Nothing
outside this machine can be reached, so that no page waits for a font or a counter of visitors.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import shutil
import socket
import statistics
import subprocess
import sys
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from importlib import util
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

HOST = "127.0.0.1"
NUM_LOADS, NUM_QUICK_LOADS = 5, 1
"""Measured loads of a round, each with an empty cache, after one that warms the server up."""
TIMEOUT_MS = 60_000
SETTLE_MS = 2_000
"""Until the scripts have drawn what they have loaded, after the first value is visible."""
START_S = 90.0
STOP_S = 10.0
ASK_EVERY_S = 0.1
ASK_S = 10.0
TYPED = "bench"
"""Typed into the page's search field, one interaction per key."""
KEY_MS = 20_000
OPTIONS = (
    "--no-sandbox",  # Chromium refuses its sandbox to root
    "--disable-dev-shm-usage",
    f"--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE {HOST}, EXCLUDE localhost",
)

WATCH = """
(names) => {
  const wanted = new RegExp(names);
  const roots = [];
  const attach = Element.prototype.attachShadow;
  Element.prototype.attachShadow = function (options) {
    const root = attach.call(this, options);
    roots.push(root);
    return root;
  };
  const afterFrame = (act) => {
    const channel = new MessageChannel();
    channel.port1.onmessage = act;
    channel.port2.postMessage(0);
  };
  const isVisible = (text) => {
    if (!text.parentElement?.checkVisibility({ checkOpacity: true, checkVisibilityCSS: true })) return false;
    const range = document.createRange();
    range.selectNodeContents(text);
    const box = range.getBoundingClientRect();
    return box.width > 0 && box.height > 0 && box.bottom > 0 && box.right > 0
      && box.top < innerHeight && box.left < innerWidth;
  };
  const found = () => [document.body, ...roots].some((root) => {
    const texts = document.createTreeWalker(root, NodeFilter.SHOW_TEXT);
    while (texts.nextNode()) {
      if (wanted.test(texts.currentNode.data) && isVisible(texts.currentNode)) return true;
    }
    return false;
  });
  const look = () => {
    if (document.body !== null && found()) {
      afterFrame(() => { window.strataUsefulMs = performance.now(); });
    } else {
      requestAnimationFrame(look);
    }
  };
  requestAnimationFrame(look);

  window.strataKeysMs = [];
  addEventListener("keydown", (event) => {
    requestAnimationFrame(() => {
      afterFrame(() => { window.strataKeysMs.push(performance.now() - event.timeStamp); });
    });
  }, { capture: true });
}
"""
"""Runs in the page before its own scripts: notes the end of the frame that first shows a name, and of the frame after
each key."""

LOADED = """
() => {
  const byUseful = performance.getEntriesByType("resource")
    .filter((each) => each.responseEnd <= window.strataUsefulMs).map((each) => each.name);
  return {
    useful_ms: window.strataUsefulMs,
    contentful_ms: performance.getEntriesByName("first-contentful-paint")[0]?.startTime ?? null,
    resources: byUseful,
    inline: [...document.querySelectorAll("script:not([src])")].map((each) => each.textContent).join(""),
  };
}
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """One load of a page."""

    useful_ms: float
    contentful_ms: float | None
    script_ms: float
    scripts: frozenset[str]
    """URLs of the scripts that had been loaded when the first value was visible."""
    inline: str
    """The scripts inside the page."""
    key_ms: float | None
    """The slowest key; None if the page has no search field."""


def missing(*packages: str) -> str | None:
    """Return what is not installed: a package, or the browser."""
    absent = [package for package in ("playwright", *packages) if util.find_spec(package) is None]
    return absent[0] if absent else None if shutil.which("chromium") else "chromium"


def report(prefix: str, measured: Mapping[str, float], versions: Mapping[str, str]) -> None:
    """Print the figures as a contender's answer."""
    print(json.dumps({"figures": {f"{prefix}{key}": found for key, found in measured.items()}, "versions": versions}))


def measure(
    url: str, *, names: str, field: str, shortcut: str = "", cookies: Mapping[str, str] | None = None
) -> dict[str, float]:
    """Load a page a few times and return the median of each figure.

    Args:
        names: A regular expression of the texts of which the first visible one counts.
        field: Selector of the search field that interactions type into.
        shortcut: Keys that open it.
        cookies: Of a browser that has logged in.
    """
    num_loads = NUM_QUICK_LOADS if "--quick" in sys.argv else NUM_LOADS
    with chromium() as browser:
        loads = [load(browser, url, names, field, shortcut, cookies or {}) for _ in range(1 + num_loads)][1:]
    found = {
        "entry_js_gz_kb": script_bytes(loads[-1]) / 1e3,
        "first_useful_paint_ms": statistics.median(each.useful_ms for each in loads),
        "script_ms": statistics.median(each.script_ms for each in loads),
    }
    contentful = [each.contentful_ms for each in loads if each.contentful_ms is not None]
    keys = [each.key_ms for each in loads if each.key_ms is not None]
    found |= {"first_contentful_paint_ms": statistics.median(contentful)} if contentful else {}
    return found | ({"interaction_ms": statistics.median(keys)} if keys else {})


@contextlib.contextmanager
def chromium() -> Iterator[Any]:
    """Run Debian's Chromium for the duration of the block."""
    from playwright.sync_api import sync_playwright  # noqa: PLC0415 - of the tests' and the peers' environments

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=list(OPTIONS))
        try:
            yield browser
        finally:
            browser.close()


def load(browser: Any, url: str, names: str, field: str, shortcut: str, cookies: Mapping[str, str]) -> Load:
    """Load the page in a new context and wait until a name is visible."""
    context = browser.new_context(viewport={"width": 1_280, "height": 800})
    try:
        context.add_cookies([{"name": name, "value": one, "url": url} for name, one in cookies.items()])
        context.add_init_script(f"({WATCH})({json.dumps(names)})")
        page = context.new_page()
        page.set_default_timeout(TIMEOUT_MS)
        scripts: set[str] = set()
        page.on("request", lambda request: scripts.add(request.url) if request.resource_type == "script" else None)
        profile = context.new_cdp_session(page)
        profile.send("Performance.enable")
        page.goto(url, wait_until="commit")
        page.wait_for_function("() => window.strataUsefulMs !== undefined")
        page.wait_for_timeout(SETTLE_MS)
        measured = {each["name"]: each["value"] for each in profile.send("Performance.getMetrics")["metrics"]}
        loaded = page.evaluate(LOADED)
        return Load(
            useful_ms=loaded["useful_ms"],
            contentful_ms=loaded["contentful_ms"],
            script_ms=measured["ScriptDuration"] * 1e3,
            scripts=frozenset(scripts & set(loaded["resources"])),
            inline=loaded["inline"],
            key_ms=slowest_key_ms(page, field, shortcut),
        )
    finally:
        context.close()


def slowest_key_ms(page: Any, field: str, shortcut: str) -> float | None:
    """Type into the search field; return the longest time from a key to the end of the next frame."""
    if shortcut:
        page.keyboard.press(shortcut)
        page.locator(field).first.wait_for(timeout=KEY_MS)
    elif page.locator(field).count() == 0:
        return None
    page.locator(field).first.click(timeout=KEY_MS)
    page.evaluate("() => { window.strataKeysMs = []; }")
    for number, key in enumerate(TYPED, 1):
        page.keyboard.press(key)
        page.wait_for_function("(number) => window.strataKeysMs.length >= number", arg=number, timeout=KEY_MS)
    return float(max(page.evaluate("() => window.strataKeysMs")))


def script_bytes(loaded: Load) -> int:
    """Return the size of the scripts, each compressed with gzip, whether or not the server compresses them."""
    texts = [*map(fetch, sorted(loaded.scripts)), loaded.inline.encode()]
    return sum(len(gzip.compress(text)) for text in texts if text)


def fetch(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=ASK_S) as answer:  # noqa: S310 - of a server on loopback
        body: bytes = answer.read()
        return gzip.decompress(body) if answer.headers.get("content-encoding") == "gzip" else body


# -- servers of peers ----------------------------------------------------------------------------------------------


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def serving(command: Sequence[str], *, url: str, has: str = "", env: Mapping[str, str] | None = None) -> Iterator[None]:
    """Run a peer's server for the duration of the block, once its answer at `url` contains `has`."""
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=sys.stderr, env=env)
    try:
        wait_until(lambda: answers(url, has), f"{command[0]} answers at {url}", process)
        yield
    finally:
        process.terminate()
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def wait_until(is_true: Callable[[], bool], what: str, process: subprocess.Popen[bytes] | None = None) -> None:
    """Wait for a peer.

    Raises:
        TimeoutError: It took too long, or its process has exited.
    """
    deadline_s = time.monotonic() + START_S
    while not is_true():
        if process is not None and process.poll() is not None:
            raise TimeoutError(f"lost: exited with code {process.returncode} before {what}")
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"lost: {what} not within {START_S:g} s")
        time.sleep(ASK_EVERY_S)


def answers(url: str, has: str) -> bool:
    try:
        return has in fetch(url).decode(errors="replace")
    except (OSError, urllib.error.URLError):
        return False
