"""Static files, sessions, and the owner of a connection."""

from __future__ import annotations

import gzip
import os
import socket
import sys
from pathlib import Path

import pytest
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException

from strata.clock import ManualClock
from strata.coordinator.http import peers
from strata.dashboard.http.pages import FOREVER, NOT_BUILT, Pages, read_files
from strata.dashboard.http.sessions import LIFETIME_S, Sessions

SECRET = "reader-token-0123456789"


@pytest.fixture
def static(tmp_path: Path) -> Path:
    page = tmp_path / "static"
    (page / "assets").mkdir(parents=True)
    (page / "index.html").write_text("<!doctype html><title>Strata</title>")
    (page / "assets" / "index-Bx3kQz9a.js").write_text("plain")
    (page / "assets" / "index-Bx3kQz9a.js.gz").write_bytes(b"gzipped")
    (page / "assets" / "index-Bx3kQz9a.js.br").write_bytes(b"brotli")
    (page / "logo.svg").write_text("<svg/>")
    (page / ".hidden").write_text("secret")
    (tmp_path / "outside.txt").write_text("secret")
    (page / "link.txt").symlink_to(tmp_path / "outside.txt")
    return page


def pages(directory: Path) -> Pages:
    return Pages(read_files(directory), doors=None, not_found=None)  # type: ignore[arg-type]  # not needed to answer


def test_the_page_forbids_inline_code_foreign_resources_and_frames(static: Path) -> None:
    found = pages(static).answer("/", Headers())
    policy = dict(each.split(" ", 1) for each in found.headers["content-security-policy"].split("; "))

    assert found.status_code == 200
    assert found.headers["content-type"] == "text/html; charset=utf-8"
    assert (policy["default-src"], policy["script-src"], policy["style-src"]) == ("'none'", "'self'", "'self'")
    assert (policy["frame-ancestors"], policy["base-uri"], policy["connect-src"]) == ("'none'", "'none'", "'self'")
    assert "unsafe" not in found.headers["content-security-policy"]
    assert found.headers["x-content-type-options"] == "nosniff"
    assert found.headers["cache-control"] == "no-cache"


@pytest.mark.parametrize(
    ("accepted", "encoding", "body"),
    [
        ("gzip, deflate, br", "br", b"brotli"),
        ("gzip;q=0.5", "gzip", b"gzipped"),
        ("identity", None, b"plain"),
        ("", None, b"plain"),
    ],
)
def test_hashed_files_are_served_compressed_and_cached_for_ever(
    static: Path, accepted: str, encoding: str | None, body: bytes
) -> None:
    found = pages(static).answer("/assets/index-Bx3kQz9a.js", Headers({"accept-encoding": accepted}))

    assert (found.headers.get("content-encoding"), found.body) == (encoding, body)
    assert found.headers["content-type"] == "text/javascript; charset=utf-8"
    assert (found.headers["cache-control"], found.headers["vary"]) == (FOREVER, "accept-encoding")


def test_files_that_are_not_compressed_yet_are_compressed_at_the_start(static: Path) -> None:
    (static / "assets" / "page-C8f2kQz9.css").write_text("a { color: red }\n" * 200)
    (static / "assets" / "photo-C8f2kQz9.png").write_bytes(bytes(5_000))
    accepting = Headers({"accept-encoding": "gzip, br"})
    styles = pages(static).answer("/assets/page-C8f2kQz9.css", accepting)
    photo = pages(static).answer("/assets/photo-C8f2kQz9.png", accepting)

    assert styles.headers["content-encoding"] == "gzip"
    assert gzip.decompress(bytes(styles.body)).startswith(b"a { color: red }")
    assert "content-encoding" not in photo.headers


def test_an_unchanged_file_is_not_sent_again(static: Path) -> None:
    first = pages(static).answer("/logo.svg", Headers())
    again = pages(static).answer("/logo.svg", Headers({"if-none-match": first.headers["etag"]}))

    assert (again.status_code, again.body) == (304, b"")
    assert first.headers["cache-control"] == "no-cache"


@pytest.mark.parametrize("path", ["/workers", "/jobs/resnet/metrics", "/runs/<script>alert(1)</script>", "/.hidden"])
def test_unknown_paths_are_views_of_the_page(static: Path, path: str) -> None:
    found = pages(static).answer(path, Headers())

    assert (found.status_code, found.body) == (200, b"<!doctype html><title>Strata</title>")


@pytest.mark.parametrize(
    "path",
    ["/../outside.txt", "/assets/../../outside.txt", "/a/../../outside.txt", "/assets/missing.js", "//../outside.txt"],
)
def test_paths_to_other_files_are_refused(static: Path, path: str) -> None:
    with pytest.raises(HTTPException) as refused:
        pages(static).answer(path, Headers())

    assert refused.value.status_code == 404


@pytest.mark.parametrize("path", ["/link.txt", "/outside.txt", "/assets/%2e%2e/%2e%2e/outside.txt", "/..\\outside.txt"])
def test_nothing_outside_the_folder_is_ever_sent(static: Path, path: str) -> None:
    try:
        body = pages(static).answer(path, Headers()).body
    except HTTPException:
        return
    assert b"secret" not in body


def test_a_page_that_was_not_built_says_how_to_build_it(tmp_path: Path) -> None:
    found = pages(tmp_path / "nothing").answer("/", Headers())

    assert (found.status_code, found.body.decode()) == (404, NOT_BUILT)
    assert "make web" in NOT_BUILT


# -- sessions ----------------------------------------------------------------------------------------------------------


def test_a_session_stands_for_its_token_until_it_ends() -> None:
    clock = ManualClock()
    sessions = Sessions(clock.monotonic_s)
    first, second = sessions.begin(SECRET), sessions.begin(SECRET)

    assert first != second
    assert len(first) >= 43
    assert (sessions.token_of(first), sessions.token_of("guess"), sessions.token_of("")) == (SECRET, "", "")
    sessions.end(first)
    sessions.end(first)
    assert (sessions.token_of(first), sessions.token_of(second)) == ("", SECRET)
    clock.advance(LIFETIME_S)
    assert sessions.token_of(second) == ""
    sessions.begin(SECRET)
    assert len(sessions) == 1


def test_the_oldest_session_makes_room_for_another() -> None:
    sessions = Sessions(ManualClock().monotonic_s, max_sessions=2)
    first, second, third = (sessions.begin(SECRET) for _ in range(3))

    assert [sessions.token_of(each) for each in (first, second, third)] == ["", SECRET, SECRET]


def test_no_token_appears_in_the_text_of_a_session() -> None:
    sessions = Sessions(ManualClock().monotonic_s)
    sessions.begin(SECRET)

    assert SECRET not in repr(sessions) + repr(vars(sessions))


# -- owners of connections ---------------------------------------------------------------------------------------------

TABLE = """\
  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode
   0: 0100007F:1F90 00000000:0000 0A 00000000:00000000 00:00000000 00000000  1000        0 1
   1: 0100007F:9C40 0100007F:1F90 01 00000000:00000000 00:00000000 00000000  1001        0 2
   2: 0100007F:1F90 0100007F:9C40 01 00000000:00000000 00:00000000 00000000  1000        0 3
   3: 0100007F:9C41 0100007F:1F90 06 00000000:00000000 00:00000000 00000000     0        0 0
""".splitlines()


@pytest.mark.skipif(sys.byteorder != "little", reason="the table is of a little-endian machine")
def test_the_owner_of_a_connection_is_that_of_the_clients_end() -> None:
    server = ("127.0.0.1", 0x1F90)

    assert peers.find_owner(TABLE, client=("127.0.0.1", 0x9C40), server=server) == 1001


@pytest.mark.parametrize("client", [("127.0.0.1", 0x9C41), ("127.0.0.1", 0x9C42), ("127.0.0.2", 0x9C40), ("odd", 1)])
def test_a_connection_that_is_closed_or_unknown_has_no_owner(client: tuple[str, int]) -> None:
    assert peers.find_owner(TABLE, client=client, server=("127.0.0.1", 0x1F90)) is None


@pytest.mark.parametrize(("family", "host"), [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")])
def test_the_kernel_says_that_our_own_connections_are_ours(family: socket.AddressFamily, host: str) -> None:
    try:
        listening = socket.create_server((host, 0), family=family)
    except OSError:
        pytest.skip(f"no {host} here")
    with listening, socket.create_connection(listening.getsockname()[:2]) as client:
        accepted, address = listening.accept()
        with accepted:
            assert peers.is_own_user(address[:2], accepted.getsockname()[:2])
            assert (
                peers.find_owner(peers._lines(), client=address[:2], server=accepted.getsockname()[:2]) == os.geteuid()
            )
        assert client.fileno() >= 0
    assert not peers.is_own_user(None, None)
