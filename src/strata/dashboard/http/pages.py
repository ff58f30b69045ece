"""The static files of the page, from memory.

All files are read once, so a request looks up a name in a table: there is no path to escape from. Unknown paths are
views of the page and get `index.html`. The headers allow the page nothing but its own files and this server.
"""

from __future__ import annotations

import gzip
import hashlib
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

if TYPE_CHECKING:
    from pathlib import Path

    from starlette.datastructures import Headers
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from strata.coordinator.http.access import Doors

INDEX = "index.html"
ASSETS = "assets/"
API = ("/api/", "/api", "/metrics", "/openapi.json")
MAX_TOTAL_BYTES = 64 * 1024 * 1024
ENCODINGS = (("br", ".br"), ("gzip", ".gz"))
"""The best first."""
TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".json": "application/json",
    ".map": "application/json",
    ".webmanifest": "application/manifest+json",
    ".svg": "image/svg+xml",
    ".png": "image/png",
    ".ico": "image/x-icon",
    ".woff2": "font/woff2",
    ".txt": "text/plain; charset=utf-8",
}
"""Other files are served as bytes."""
COMPRESSIBLE = (".html", ".js", ".css", ".json", ".svg", ".map", ".txt", ".webmanifest")
MIN_COMPRESSED_BYTES = 1_024
FOREVER = "public, max-age=31536000, immutable"
CHECK = "no-cache"
HASHED = re.compile(r"[-.][A-Za-z0-9_-]{8,}\.[a-z0-9]+$")
"""Names such as `assets/index-Bx3kQz9a.js`: another content has another name."""
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; font-src 'self'; "
    "connect-src 'self'; manifest-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
)
SECURITY_HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}
NOT_BUILT = (
    "The page of the dashboard is not built in this source tree. Build it with:\n\n    make web\n\n"
    "and start this server again. The API works without it: /openapi.json describes it.\n"
)


@dataclass(frozen=True, slots=True)
class StaticFile:
    name: str
    content: bytes
    encoded: dict[str, bytes]
    """By encoding."""

    @property
    def media_type(self) -> str:
        return TYPES.get("." + self.name.rpartition(".")[2], "application/octet-stream")

    @property
    def cache_control(self) -> str:
        return FOREVER if self.name.startswith(ASSETS) and HASHED.search(self.name) else CHECK

    def etag(self, encoding: str) -> str:
        content = self.encoded.get(encoding, self.content)
        return f'"{hashlib.sha256(content).hexdigest()[:32]}"'


def read_files(directory: Path) -> dict[str, StaticFile]:
    """Return all files below a directory by their relative names; nothing if it does not exist."""
    suffixes = tuple(suffix for _, suffix in ENCODINGS)
    contents: dict[str, bytes] = {}
    num_bytes = 0
    for path in sorted(directory.rglob("*")):
        if path.is_file() and not path.is_symlink() and not path.name.startswith("."):
            contents[path.relative_to(directory).as_posix()] = content = path.read_bytes()
            num_bytes += len(content)
            assert num_bytes <= MAX_TOTAL_BYTES, f"{directory} is larger than a page can be"
    return {
        name: StaticFile(name, content, _encoded(name, contents))
        for name, content in contents.items()
        if not (name.endswith(suffixes) and name.rpartition(".")[0] in contents)
    }


def _encoded(name: str, contents: dict[str, bytes]) -> dict[str, bytes]:
    """Return a file's compressed forms: those that lie beside it, or one that is made now if it is worth it."""
    found = {encoding: contents[name + suffix] for encoding, suffix in ENCODINGS if name + suffix in contents}
    content = contents[name]
    if not found and len(content) >= MIN_COMPRESSED_BYTES and name.endswith(COMPRESSIBLE):
        found["gzip"] = gzip.compress(content, mtime=0)
    return found


class Pages:
    """Serves what no route does: files and views of the page."""

    def __init__(self, files: dict[str, StaticFile], doors: Doors, not_found: ASGIApp) -> None:
        self._files = files
        self._doors = doors
        self._not_found = not_found

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path", "")
        is_api = path.startswith(API[0]) or path in API
        if scope["type"] != "http" or scope["method"] not in ("GET", "HEAD") or is_api:
            await self._not_found(scope, receive, send)
            return
        request = Request(scope)
        self._doors.limit_rate(request)
        response = self.answer(path, request.headers)
        if scope["method"] == "HEAD":
            response.body = b""
        await response(scope, receive, send)

    def answer(self, path: str, headers: Headers) -> Response:
        name = path.removeprefix("/") or INDEX
        file = self._files.get(name)
        if file is None:
            if name.startswith(ASSETS) or ".." in name.split("/"):
                raise HTTPException(404)
            file = self._files.get(INDEX)
        if file is None:
            return PlainTextResponse(NOT_BUILT, status_code=404, headers=SECURITY_HEADERS)
        accepted = {each.partition(";")[0].strip() for each in headers.get("accept-encoding", "").split(",")}
        encoding = next((each for each, _ in ENCODINGS if each in accepted and each in file.encoded), "")
        etag = file.etag(encoding)
        found = {**SECURITY_HEADERS, "etag": etag, "cache-control": file.cache_control, "vary": "accept-encoding"}
        if encoding:
            found["content-encoding"] = encoding
        if etag in headers.get("if-none-match", ""):
            return Response(status_code=304, headers=found)
        return Response(file.encoded.get(encoding, file.content), media_type=file.media_type, headers=found)


class ApiHeaders:
    """Adds headers to the answers of the API: browsers must neither guess their type, nor store them, nor show them in
    a frame.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._added = [
            (b"x-content-type-options", b"nosniff"),
            (b"content-security-policy", b"default-src 'none'; frame-ancestors 'none'"),
            (b"cross-origin-resource-policy", b"same-origin"),
        ]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                names = {name for name, _ in message["headers"]}
                message["headers"] = [
                    *message["headers"],
                    *(pair for pair in self._added if pair[0] not in names),
                    *(() if b"cache-control" in names else ((b"cache-control", b"no-store"),)),
                ]
            await send(message)

        await self._app(scope, receive, send_with_headers if scope["type"] == "http" else send)
