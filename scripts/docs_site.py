"""Hooks for mkdocs that let one set of Markdown files serve both the repository and the site.

Pages link to files outside docs/ (`../CHANGELOG.md`, `../examples/train_jax.py`). The site gets a page for each of
them: Markdown files become pages under project/, other files become pages with their source under source/. The links
are rewritten to match. A link to something that does not exist is left alone, so that `mkdocs build --strict` reports
it.

The page reference/cli.md has a marker in place of the commands, which are generated from the app.
"""

from __future__ import annotations

import os.path
import re
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from cli_reference import MARKER, reference
from mkdocs.structure.files import File, Files

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
PROJECT_PAGES = {
    "ARCHITECTURE.md": "project/architecture.md",
    "CHANGELOG.md": "project/changelog.md",
    "CONTRIBUTING.md": "project/contributing.md",
    "benchmarks/README.md": "project/benchmarks.md",
    "README.md": "project/overview.md",
}
"""Pages of the site by their paths in the repository."""
_REPOSITORY_PATHS = {page: path for path, page in PROJECT_PAGES.items()}
_FENCE = re.compile(r"^( *)(`{3,}|~{3,})(.*)$")
_LINK = re.compile(r"(\]\()([^)\s#]+)(#[^)\s]*)?(\))")
_LANGUAGES = {".py": "python", ".js": "javascript", ".proto": "protobuf", ".yaml": "yaml", ".sh": "bash"}


# -- hooks ---------------------------------------------------------------------------------------------------------


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add the pages for files outside docs/."""
    for path, page in PROJECT_PAGES.items():
        files.append(File.generated(config, page, abs_src_path=str(ROOT / path)))
    for path in sorted(_linked_sources(files)):
        files.append(File.generated(config, _source_page(path), content=_source_text(path)))
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:  # noqa: ARG001
    """Fill in the command line, and turn the Markdown of the repository into that of the site."""
    src_uri = page.file.src_uri
    if MARKER in markdown:
        markdown = markdown.replace(MARKER, reference())
    if src_uri.startswith("source/"):
        return markdown
    return "\n".join(_site_lines(markdown, src_uri))


# -- the parts, for tests ------------------------------------------------------------------------------------------


def site_link(target: str, src_uri: str) -> str:
    """Return the link on the page `src_uri` of the site that stands for `target`, a path as the repository has it."""
    if "://" in target or target.startswith("mailto:"):
        return target
    path = _repository_path(target, src_uri)
    if path is None or not (ROOT / path).exists():
        return target
    return os.path.relpath(_site_page(path), PurePosixPath(src_uri).parent)


def _site_lines(markdown: str, src_uri: str) -> Iterator[str]:
    opened = ""
    for line in markdown.split("\n"):
        fence = _FENCE.match(line)
        if fence is None:
            yield line if opened else _LINK.sub(lambda found: _with_site_link(found, src_uri), line)
        elif not opened:
            opened = fence[2]
            yield f"{fence[1]}{fence[2]}{_site_info(fence[3].strip())}"
        else:
            opened = "" if fence[2].startswith(opened) and not fence[3].strip() else opened
            yield line


def _with_site_link(found: re.Match[str], src_uri: str) -> str:
    return f"{found[1]}{site_link(found[2], src_uri)}{found[3] or ''}{found[4]}"


def _site_info(info: str) -> str:
    """Drop what is for our tests behind the language of a block: `python no-run`, `yaml coordinator.yaml`."""
    language, _, rest = info.partition(" ")
    return info if "=" in rest else language


def _repository_path(target: str, src_uri: str) -> str | None:
    """Return the path from the root of the repository, or None for one outside of it."""
    here = _REPOSITORY_PATHS.get(src_uri, f"docs/{src_uri}")
    path = os.path.normpath(PurePosixPath(here).parent / target)
    return None if path.startswith("..") else path


def _site_page(path: str) -> str:
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return PROJECT_PAGES.get(path) or _source_page(path)


def _source_page(path: str) -> str:
    return f"source/{path}.md"


def _source_text(path: str) -> str:
    """Return a page that shows a file, or all files of a directory."""
    place = ROOT / path
    if place.is_file():
        return f"---\nsearch:\n  exclude: true\n---\n\n# {path}\n\n{_shown(place)}"
    shown = (f"## {file.name}\n\n{_shown(file)}" for file in sorted(place.iterdir()) if file.is_file())
    return "\n\n".join([f"---\nsearch:\n  exclude: true\n---\n\n# {path}", *shown])


def _shown(file: Path) -> str:
    return f"````{_LANGUAGES.get(file.suffix, 'text')}\n{file.read_text(encoding='utf-8').rstrip()}\n````\n"


def _linked_sources(files: Files) -> set[str]:
    """Return the paths of files and directories that pages link to and that are no pages themselves."""
    found = set()
    for file in files.documentation_pages():
        opened = False
        for line in file.content_string.split("\n"):
            opened = opened != bool(_FENCE.match(line))
            if opened:
                continue
            for _, target, _, _ in _LINK.findall(line):
                path = None if "://" in target else _repository_path(target, file.src_uri)
                if path and not path.startswith("docs/") and path not in PROJECT_PAGES and (ROOT / path).exists():
                    found.add(path)
    return found
