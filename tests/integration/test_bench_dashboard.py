"""The benchmark of the dashboard: what counts as the first useful paint, and its contenders at a small size."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from strata.bench.contenders import dashboard_page, dashboard_runs
from strata.bench.dashboard import BENCHMARK, PAGE, PEERS

DEADLINE_S = 170
SCRIPT = b"window.strataTest = 'loaded before the first useful paint';\n" * 100
LATE_MS = 300
PAGE_HTML = f"""
<!doctype html>
<title>bench-run-00</title>
<script src="/entry.js"></script>
<h1>Loading</h1>
<p style="display: none">bench-run-00</p>
<p style="position: absolute; top: 5000px">bench_loss</p>
<input type="search">
<div id="host"></div>
<script>
  setTimeout(() => {{
    const root = document.getElementById("host").attachShadow({{ mode: "closed" }});
    root.innerHTML = "<b>run bench-run-07</b>";
  }}, {LATE_MS});
  const late = setInterval(() => {{
    if (window.strataUsefulMs === undefined) return;
    clearInterval(late);
    document.head.append(Object.assign(document.createElement("script"), {{ src: "/late.js" }}));
  }}, 10);
</script>
"""


class Pages(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        is_script = self.path.endswith(".js")
        body = SCRIPT if is_script else textwrap.dedent(PAGE_HTML).encode()
        self.send_response(200)
        self.send_header("content-type", "text/javascript" if is_script else "text/html")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments: object) -> None:
        pass


@contextmanager
def served() -> Iterator[str]:
    server = ThreadingHTTPServer((dashboard_page.HOST, 0), Pages)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://{dashboard_page.HOST}:{server.server_port}/"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_a_page_is_of_use_once_a_name_can_be_seen_even_in_a_closed_shadow_root(
    requires_service: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    requires_service("chromium")
    monkeypatch.setattr(dashboard_page, "SETTLE_MS", 300)
    with served() as url, dashboard_page.chromium() as browser:
        found = dashboard_page.load(browser, url, dashboard_runs.NAMES, "input", "", {})
        size = dashboard_page.script_bytes(found)

    assert found.useful_ms >= LATE_MS, "a hidden name, one below the window and the title do not count"
    assert found.contentful_ms is not None
    assert found.contentful_ms < found.useful_ms, "its heading is painted before"
    assert found.scripts == {f"{url}entry.js"}, "a script that is loaded later is no part of the first view"
    assert size == len(gzip.compress(SCRIPT)) + len(gzip.compress(found.inline.encode()))
    assert found.key_ms is not None
    assert 0 < found.key_ms < dashboard_page.KEY_MS


def test_a_peer_whose_server_exits_is_lost_and_named() -> None:
    with (
        pytest.raises(TimeoutError, match=r"lost: exited with code 3 before .* answers at http://127"),
        dashboard_page.serving([sys.executable, "-c", "raise SystemExit(3)"], url="http://127.0.0.1:9/"),
    ):
        pass


def test_the_figures_of_all_pages_have_the_same_names() -> None:
    keys = {figure.key for figure in BENCHMARK.figures}
    assert {f"{prefix}_{key}" for prefix in PEERS for key, *_ in PAGE} < keys
    assert {"http_cpu_fraction", "overview_kb", "overview_ms", "entry_js_gz_kb", "first_useful_paint_ms"} < keys
    assert {"vs_best_peer_paint", "tree_20k_ms", "histogram_64mib_ms"} < keys


@pytest.mark.slow
@pytest.mark.timeout(DEADLINE_S + 10)
def test_our_contenders_report_their_figures(requires_service: Callable[..., Path]) -> None:
    requires_service("chromium")
    ours = ("1,000 workers", "strata", "explorer", "safetensors and numpy")
    chosen = [word for name in ours for word in ("--only", name)]
    ended = subprocess.run(
        [sys.executable, "-m", "strata.cli", "bench", "dashboard", "--quick", "--json", *chosen],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    figures = json.loads(ended.stdout.splitlines()[-1])["figures"]
    assert set(figures) == {
        *("http_cpu_fraction", "http_workers_cpu_fraction", "http_unseen_cpu_fraction", "without_http_cpu_fraction"),
        *("heartbeats_fraction", "overview_kb", "overview_ms", "overview_p99_ms"),
        *(key for key, *_ in PAGE),
        *("tree_20k_ms", "safetensors_tree_20k_ms", "histogram_64mib_ms", "safetensors_histogram_64mib_ms"),
    }
    assert all(value > 0 for key, value in figures.items() if not key.endswith("fraction"))
    assert figures["first_contentful_paint_ms"] <= figures["first_useful_paint_ms"]
