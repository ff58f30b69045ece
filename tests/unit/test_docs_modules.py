"""Design pages and docstrings name modules that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NAME = re.compile(r"`([\w/]+\.py)`")
PAGES = [ROOT / "ARCHITECTURE.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
MODULES = [
    "/" + path.relative_to(ROOT).as_posix()
    for folder in ("src", "tests", "scripts", "examples")
    for path in (ROOT / folder).rglob("*.py")
]
PACKAGES = {path.parent.name for path in (ROOT / "src" / "strata").glob("*/__init__.py")}
CELL = re.compile(r"^\| (`[^|]*) \|", re.MULTILINE)
"""First cell of a row."""
PATH = re.compile(r"`([a-z_][a-z0-9_./]*)`")
USER_SCRIPTS = {"train.py", "before.py", "predict.py"}  # scripts of the reader


def unknown_modules(text: str) -> list[str]:
    names = {name for name in NAME.findall(text) if name not in USER_SCRIPTS}
    return sorted(name for name in names if not any(module.endswith(f"/{name}") for module in MODULES))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_module_that_a_page_names_exists(page: Path) -> None:
    assert unknown_modules(page.read_text(encoding="utf-8")) == []


def test_every_module_that_a_docstring_names_exists() -> None:
    found = {
        path.relative_to(ROOT).as_posix(): unknown
        for path in sorted((ROOT / "src" / "strata").rglob("*.py"))
        if (unknown := unknown_modules(path.read_text(encoding="utf-8")))
    }

    assert found == {}


def unknown_in_rows(text: str) -> list[str]:
    """Return names in the first cells of tables that are not modules: `checkpoint.save.job`, `writer` means two modules
    of one folder.
    """
    unknown = []
    for cell in CELL.findall(text):
        folder = ""
        for name in PATH.findall(cell):
            path = name.removesuffix(".py").strip("/").replace(".", "/")
            if path.split("/")[0] in PACKAGES:
                folder = path.rpartition("/")[0]
            elif not folder:
                break  # a table of something else
            else:
                path = f"{folder}/{path}"
            if not {f"/src/strata/{path}.py", f"/src/strata/{path}/__init__.py"} & set(MODULES):
                unknown.append(path)
    return unknown


@pytest.mark.parametrize("page", sorted((ROOT / "docs" / "design").glob("*.md")), ids=lambda page: page.name)
def test_every_row_of_a_design_page_names_modules_that_exist(page: Path) -> None:
    assert unknown_in_rows(page.read_text(encoding="utf-8")) == []


def test_a_module_that_has_moved_is_found_in_a_row() -> None:
    text = "| `checkpoint.save.job`, `writer` | … |\n| `checkpoint.jobs`, `savers` | … |\n| `lease_s` | … |"

    assert unknown_in_rows(text) == ["checkpoint/jobs", "checkpoint/savers"]
