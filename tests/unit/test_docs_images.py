"""The images of the documentation are small, described in words, and all in use."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
IMAGES = ROOT / "docs" / "images"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
MARKDOWN = re.compile(r"!\[([^\]]*)\]\(([^)]+)\)")
ELEMENT = re.compile(r'<img src="([^"]+)" alt="([^"]*)"')
MAX_KIB, MAX_TOTAL_KIB = 200, 1_024
MIN_ALT_WORDS = 5


def images_of(text: str) -> list[tuple[str, str]]:
    """Return path and description of each image."""
    found = [(path, alt) for alt, path in MARKDOWN.findall(text)]
    return found + ELEMENT.findall(text)


def test_every_image_of_a_page_exists_and_is_described_in_a_sentence() -> None:
    found = [(page, *each) for page in PAGES for each in images_of(page.read_text(encoding="utf-8"))]

    assert found
    assert [str(page) for page, path, _ in found if not (page.parent / path).is_file()] == []
    assert [path for _, path, alt in found if len(alt.split()) < MIN_ALT_WORDS] == []


def test_every_image_is_on_a_page() -> None:
    shown = {Path(path).name for page in PAGES for path, _ in images_of(page.read_text(encoding="utf-8"))}

    assert sorted(path.name for path in IMAGES.iterdir() if path.name not in shown) == []


def test_images_stay_small_alone_and_together() -> None:
    sizes_kib = {path.name: path.stat().st_size / 1_024 for path in IMAGES.glob("*.png")}

    assert {name: size for name, size in sizes_kib.items() if size > MAX_KIB} == {}
    assert sum(sizes_kib.values()) <= MAX_TOTAL_KIB


def test_every_screenshot_can_be_made_again() -> None:
    script = ast.parse((ROOT / "scripts" / "screenshots.py").read_text(encoding="utf-8"))
    words = {node.value for node in ast.walk(script) if isinstance(node, ast.Constant) and isinstance(node.value, str)}

    assert [path.name for path in IMAGES.glob("*.png") if path.stem not in words] == []


def test_an_image_without_words_is_found() -> None:
    assert images_of('![](a.png) <img src="b.png" alt="Two words">') == [("a.png", ""), ("b.png", "Two words")]
