"""`strata dashboard` as a process, and its application's protections."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import safetensors.numpy
from fastapi.testclient import TestClient

from strata.dashboard.explorer.limits import ExplorerConfig
from strata.dashboard.explorer.places import Places, open_place
from strata.dashboard.explorer.server import make_explorer_app
from strata.transport.tokens import Guard, bearer, parse_grants

TOKEN = "0123456789abcdef0123456789abcdef"
START_S = 50.0


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "x.safetensors"
    safetensors.numpy.save_file({"w": np.ones((2, 2), np.float32)}, path)
    return path


@contextmanager
def application(file: Path, *, static: Path, token: str = "") -> Iterator[TestClient]:
    grants = parse_grants([f"reader {token}"], source="test") if token else None
    guard = Guard((lambda: grants) if grants is not None else None)
    names = frozenset({"localhost", "testserver"})
    places = Places([open_place(str(file))])
    with TestClient(make_explorer_app(places, guard, names=names, config=ExplorerConfig(), static=static)) as client:
        yield client


def test_without_a_built_page_the_server_names_the_command_that_builds_it(file: Path, tmp_path: Path) -> None:
    with application(file, static=tmp_path / "absent") as client:
        answer = client.get("/")

        assert "make web" in answer.text
        assert answer.headers["content-type"].startswith("text/plain")
        assert "default-src 'none'" in answer.headers["content-security-policy"]
        assert client.get("/api/explorer/places").json()["items"][0]["kind"] == "file"


def test_the_page_is_served_if_it_is_built(file: Path, tmp_path: Path) -> None:
    (tmp_path / "static" / "assets").mkdir(parents=True)
    (tmp_path / "static" / "index.html").write_text("<title>Strata</title>")
    with application(file, static=tmp_path / "static") as client:
        assert client.get("/").text == "<title>Strata</title>"
        assert client.get("/checkpoints").text == "<title>Strata</title>", "a view of the page"
        assert client.get("/assets/absent.js").status_code == 404
        for path in ("/../x.safetensors", "/%2e%2e/x.safetensors"):
            assert b"float" not in client.get(path).content


def test_a_page_of_another_site_is_refused_by_its_host(file: Path, tmp_path: Path) -> None:
    with application(file, static=tmp_path) as client:
        answer = client.get("/api/explorer/places", headers={"host": "evil.example"})

        assert answer.status_code == 421
        assert "evil.example" in answer.json()["error"]["message"]


def test_with_tokens_every_request_needs_one(file: Path, tmp_path: Path) -> None:
    with application(file, static=tmp_path, token=TOKEN) as client:
        assert client.get("/api/explorer/places").status_code == 401
        assert client.get("/api/explorer/places", headers={"authorization": bearer("x" * 32)}).status_code == 401
        assert client.get("/api/explorer/places", headers={"authorization": bearer(TOKEN)}).status_code == 200


def test_a_browser_logs_in_with_a_token_once(file: Path, tmp_path: Path) -> None:
    with application(file, static=tmp_path, token=TOKEN) as client:
        assert client.get("/api/session").json()["login_required"]
        own = {"x-strata-request": "1"}
        assert client.post("/api/login", json={"token": "x" * 32}, headers=own).status_code == 401
        assert client.post("/api/login", json={"token": TOKEN}).status_code == 403, "a page of another site"
        assert client.post("/api/login", json={"token": TOKEN}, headers=own).json()["role"] == "reader"

        assert not client.get("/api/session").json()["login_required"]
        assert client.get("/api/explorer/places").status_code == 200
        assert client.post("/api/logout", headers=own).status_code == 204
        assert client.get("/api/explorer/places").status_code == 401


def test_a_wrong_parameter_has_the_shape_of_every_error(file: Path, tmp_path: Path) -> None:
    with application(file, static=tmp_path) as client:
        problem = client.get("/api/explorer/histogram", params={"place": "x", "id": "y", "name": "w", "bins": 0}).json()

        assert (problem["error"]["kind"], problem["error"]["field"]) == ("InvalidArgument", "bins")
        assert client.get("/api/nothing").status_code == 404


def command(*arguments: str | Path) -> list[str]:
    return [sys.executable, "-m", "strata.cli", "dashboard", *map(str, arguments)]


def test_the_command_serves_a_file_until_it_is_stopped(file: Path) -> None:
    with subprocess.Popen(command(file, "--port", "0", "--json"), stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            announced: Any = json.loads(process.stdout.readline())
            url, (place,) = announced["http"], announced["places"]
            assert re.fullmatch(r"http://127\.0\.0\.1:\d+", url)
            query = {"place": place, "id": file.name, "name": "w"}
            found = httpx.get(f"{url}/api/explorer/histogram", params=query, timeout=START_S)
            assert sum(found.json()["counts"]) == 4
            process.send_signal(signal.SIGTERM)
            assert process.wait(START_S) in (0, 143)
        finally:
            process.kill()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--host", "0.0.0.0"], "reachable from other machines without tokens and TLS"),
        (["--host", "not a host"], "cannot be bound|is not an address|reachable"),
        (["--max-read-bytes", "0"], "max-read-bytes"),
    ],
)
def test_an_unsafe_address_and_a_wrong_flag_are_refused(file: Path, arguments: list[str], words: str) -> None:
    done = subprocess.run(
        command(file, "--port", "0", *arguments), capture_output=True, text=True, timeout=START_S, check=False
    )

    assert done.returncode == 2
    assert re.search(words, " ".join(done.stderr.split()))


def test_a_location_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    done = subprocess.run(command(tmp_path / "absent"), capture_output=True, text=True, timeout=START_S, check=False)

    assert done.returncode == 2
    assert "does not exist; give a directory, a URL" in done.stderr
