"""The documentation site builds without warnings, documents everything public, and loads nothing from elsewhere."""

from __future__ import annotations

import html
import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import typer
import yaml
from documents import ROOT
from typer.testing import CliRunner

from strata.cli.app import app

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]  # builds the whole site; `make docs` does so first in CI
PACKAGES = ("strata", "strata.data", "strata.checkpoint", "strata.train")
LOADED = re.compile(r"<(?:script|img|iframe)[^>]* src=[\"']?([^\"' >]+)|<link[^>]* href=[\"']?([^\"' >]+)")


def build(config: Path, site: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--config-file", config, "--site-dir", site],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    site = tmp_path_factory.mktemp("site")
    built = build(ROOT / "mkdocs.yml", site)
    assert built.returncode == 0, built.stderr
    return site


def text_of(page: Path) -> str:
    """Return the text that a reader sees."""
    main = re.search(r"<article.*</article>", page.read_text(encoding="utf-8"), re.DOTALL)
    assert main is not None
    return html.unescape(re.sub(r"<[^>]+>", "", main[0])).replace("¶", "")


def test_no_page_loads_anything_from_another_server(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    loaded = {(one or other) for page in pages for one, other in LOADED.findall(page.read_text(encoding="utf-8"))}

    assert len(pages) > 40
    assert {place for place in loaded if "//" in place} == set()
    assert {f.name for f in site.rglob("*.css") if "url(http" in f.read_text(encoding="utf-8")} == set()


@pytest.mark.parametrize("package", PACKAGES)
def test_the_reference_documents_every_public_name(package: str, site: Path) -> None:
    pages = "".join(page.read_text(encoding="utf-8") for page in (site / "reference").glob("*.html"))
    documented = {name.rpartition(".")[2] for name in re.findall(r'id="(strata\.[\w.]+)"', pages)}

    assert set(importlib.import_module(package).__all__) - documented - {"__version__"} == set()


def test_the_reference_has_every_flag_that_help_prints(site: Path) -> None:
    page = (site / "reference" / "cli.html").read_text(encoding="utf-8")
    _, *parts = re.split(r'<h[23] id="([\w-]+)"', page)
    sections = dict(zip(parts[::2], parts[1::2], strict=True))
    paths = [path for path in commands(typer.main.get_command(app)) if path]

    assert len(paths) > 25
    for path in paths:
        result = CliRunner().invoke(app, [*path, "--help"], env={"NO_COLOR": "1", "TERM": "dumb", "COLUMNS": "160"})
        flags = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", result.output)) - {"--help"}
        assert {flag for flag in flags if flag not in sections["-".join(["strata", *path])]} == set(), path


def commands(command: object, path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    below = getattr(command, "commands", None)
    if below is None:
        return [path]
    return [found for name, each in below.items() for found in commands(each, (*path, name))]


def test_files_outside_the_docs_are_pages_of_the_site(site: Path) -> None:
    index = (site / "index.html").read_text(encoding="utf-8")
    data = (site / "data.html").read_text(encoding="utf-8")
    example = ROOT / "examples" / "train_from_parquet.py"

    assert 'href="project/changelog.html"' in index
    assert 'href="source/examples/train_from_parquet.py.html"' in data
    assert example.read_text(encoding="utf-8").strip() in text_of(site / "source" / f"examples/{example.name}.html")


@pytest.mark.parametrize("link", ["[gone](gone.md)", "[gone](#gone)", "[gone](other.md#gone)"])
def test_a_broken_link_or_anchor_fails_the_build(link: str, tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "README.md").write_text(f"# Index\n\nRead {link} and [other](other.md).\n", encoding="utf-8")
    (tmp_path / "docs" / "other.md").write_text("# Other\n", encoding="utf-8")
    config = {
        "INHERIT": str(ROOT / "mkdocs.yml"),
        "docs_dir": str(tmp_path / "docs"),
        "nav": ["README.md", "other.md"],
        "plugins": [],
        "hooks": [],
        "extra_css": [],
    }
    (tmp_path / "mkdocs.yml").write_text(yaml.safe_dump(config), encoding="utf-8")
    built = build(tmp_path / "mkdocs.yml", tmp_path / "site")

    assert built.returncode == 1
    assert "gone" in built.stderr
