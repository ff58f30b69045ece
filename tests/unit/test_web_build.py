"""The built page of the dashboard is committed, so an install needs no Node.js; it must match the sources in `web/`.

`web/scripts/stamp.mjs` stores a hash over the sources in the build. The same hash is computed here.
"""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import json
import re
from pathlib import Path

import pytest

from strata.dashboard.openapi import describe, describe_explorer

ROOT = Path(__file__).parents[2]
WEB = ROOT / "web"
BUILT = ROOT / "src" / "strata" / "dashboard" / "static"
FOLDERS = ("src", "public")
FILES = ("index.html", "package.json", "package-lock.json", "tsconfig.json", "vite.config.ts")
MAX_ENTRY_BYTES = 150_000
CURE = "run `make web` and commit src/strata/dashboard/static"


def sources(web: Path) -> list[Path]:
    """Return the files that the build depends on: tests do not change it."""
    found = [web / name for name in FILES]
    for folder in FOLDERS:
        found += [path for path in (web / folder).rglob("*") if path.is_file()]
    return [path for path in found if not path.name.endswith((".test.ts", ".test.tsx")) and path.name != "testing.ts"]


def stamp(web: Path) -> str:
    """Return the hash over the names and contents of the sources."""
    by_name = {path.relative_to(web).as_posix(): path for path in sources(web)}
    whole = hashlib.sha256()
    for name in sorted(by_name):
        whole.update(f"{hashlib.sha256(by_name[name].read_bytes()).hexdigest()}  {name}\n".encode())
    return whole.hexdigest()


def test_the_committed_page_is_built_from_the_current_sources() -> None:
    built = json.loads((BUILT / "build.json").read_text(encoding="utf-8"))

    assert built["num_sources"] == len(sources(WEB)), CURE
    assert built["sources_sha256"] == stamp(WEB), CURE


def test_the_types_of_the_page_are_generated_from_the_current_api() -> None:
    cure = "run web/scripts/renew_openapi.sh, then `make web`"
    known = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in (WEB / "openapi").glob("*.json")}
    assert known == {"dashboard": asyncio.run(describe()), "explorer": describe_explorer()}, cure


def test_a_changed_source_changes_the_stamp(tmp_path: Path) -> None:
    for name in FILES:
        (tmp_path / name).write_text("{}", encoding="utf-8")
    for folder in FOLDERS:
        (tmp_path / folder).mkdir()
    page = tmp_path / "src" / "page.tsx"
    page.write_text("a", encoding="utf-8")
    before = stamp(tmp_path)

    page.write_text("b", encoding="utf-8")
    assert stamp(tmp_path) != before
    page.write_text("a", encoding="utf-8")
    (tmp_path / "src" / "page.test.tsx").write_text("c", encoding="utf-8")
    assert stamp(tmp_path) == before


def test_the_page_loads_nothing_from_elsewhere_and_runs_nothing_inline() -> None:
    page = (BUILT / "index.html").read_text(encoding="utf-8")

    assert not re.search(r"<script(?![^>]*\bsrc=)", page)
    assert not re.search(r"<style|\sstyle=|\son\w+=", page)
    linked = re.findall(r"(?:src|href)=\"([^\"]+)\"", page)
    assert linked
    assert all(link.startswith("/") and not link.startswith("//") for link in linked)
    assert all((BUILT / link.removeprefix("/")).is_file() for link in linked)


def test_the_script_of_the_first_view_is_small() -> None:
    (entry,) = re.findall(r"<script[^>]*src=\"/([^\"]+)\"", (BUILT / "index.html").read_text(encoding="utf-8"))

    assert len((BUILT / f"{entry}.gz").read_bytes()) <= MAX_ENTRY_BYTES


@pytest.mark.parametrize("path", sorted(BUILT.rglob("*.gz")), ids=lambda path: path.name)
def test_a_compressed_file_holds_the_same_bytes(path: Path) -> None:
    assert gzip.decompress(path.read_bytes()) == path.with_suffix("").read_bytes()


def test_the_lock_file_names_no_registry() -> None:
    assert "resolved" not in (WEB / "package-lock.json").read_text(encoding="utf-8")
