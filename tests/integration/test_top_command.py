"""`strata top` with real coordinators: once, for programs, and live on a terminal."""

from __future__ import annotations

import json
import os
import pty
import select
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import pytest
from servers import DEADLINE_S, EAGER_CLIENT, free_port

from strata import cli
from strata.cli.exit_codes import ExitCode
from strata.cli.runs import choose_run
from strata.cli.top import _Coordinator, _Run, follow
from strata.clock import ManualClock
from strata.coordinator.client import CoordinatorClient
from strata.coordinator.config import CoordinatorConfig, LeaseConfig, SecurityConfig
from strata.coordinator.embedded import EmbeddedCoordinator
from strata.coordinator.extension import HttpOptions
from strata.dashboard.extension import Dashboard
from strata.errors import ConfigError, CoordinatorError
from strata.launch.record.directory import RunDirectory, RunStatus, create
from strata.launch.record.screen import Screen
from strata.launch.spec import RunSpec
from strata.transport.credentials import ClientSecurity

READER, WORKER = "reader-token-0123456789", "worker-token-0123456789"
CALM = LeaseConfig(lease_s=60.0, heartbeat_s=0.2, suspicion_s=30.0, tick_s=0.02)
SHOW_CURSOR = "\x1b[?25h"


@contextmanager
def serving(place: Path, *, port: int = 0, tokens: str = "") -> Iterator[EmbeddedCoordinator]:
    config = CoordinatorConfig(state="memory", lease=CALM, security=SecurityConfig(tokens=tokens))
    options = HttpOptions(extensions=(Dashboard(interval_s=0.02),))
    with EmbeddedCoordinator(
        config, listen=f"unix:{place}/c.sock", http=f"127.0.0.1:{port}", options=options
    ) as coordinator:
        yield coordinator


def report(coordinator: EmbeddedCoordinator, job_id: str, token: str = "") -> None:
    """Register a worker of a job, and report a loss."""
    security = ClientSecurity(token=token)
    with CoordinatorClient(coordinator.address, config=EAGER_CLIENT, security=security) as client:
        worker = client.register_worker("w0", job_id=job_id)
        worker.refresh()
        worker.report(state="TRAINING", step=7, loss=0.25)
        worker.heartbeat()


def called(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    code = 0
    try:
        cli.main(arguments)
    except SystemExit as end:
        code = int(end.code or 0)
    printed = capsys.readouterr()
    return code, printed.out, printed.err


class Terminal:
    """The outer side of a terminal on which a command draws."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self.text = ""

    def read(self) -> str:
        """Return what was drawn since the last call."""
        new = b""
        while select.select([self._fd], [], [], 0)[0]:
            new += os.read(self._fd, 65_536)
        self.text += new.decode()
        return new.decode()


@contextmanager
def terminal() -> Iterator[tuple[Terminal, Screen, ManualClock]]:
    outside, inside = pty.openpty()
    clock = ManualClock()
    with open(inside, "w", encoding="utf-8") as stream:  # noqa: PTH123 - a descriptor
        screen = Screen(stream, clock)
        yield Terminal(outside), screen, clock
        screen.close()
    os.close(outside)


def script(seen: Terminal, clock: ManualClock, *scenes: tuple[str, Callable[[], Any]]) -> Callable[[], None]:
    """Return a `pause` that waits until the text of each scene is drawn, and then does what the scene asks for."""
    left = list(scenes)
    end_s = time.monotonic() + DEADLINE_S * len(scenes)

    def pause() -> None:
        clock.advance(1.0)
        text, act = left[0]
        if text in seen.read():
            left.pop(0)
            act()
        assert time.monotonic() < end_s, f"{text!r} was not drawn: {seen.text}"

    return pause


@pytest.fixture(autouse=True)
def _terminal_type(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    for name in ("STRATA_TOKEN", "STRATA_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)


def test_without_a_terminal_the_overview_is_printed_once_and_needs_the_token(
    tmp_path: Path, run_directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "tokens").write_text(f"reader {READER}\nworker {WORKER}\n")
    (tmp_path / "token").write_text(f"{READER}\n")
    with serving(tmp_path, tokens=str(tmp_path / "tokens")) as coordinator:
        report(coordinator, "resnet", WORKER)
        command = ["top", "--http", coordinator.http_address]
        refused = called(command, capsys)
        assert refused[0] == ExitCode.FAILED
        assert "the token is missing" in refused[2]

        end_s = time.monotonic() + DEADLINE_S
        found: dict[str, Any] = {"jobs": {"items": []}}
        while not (found["jobs"]["items"] and "metric:loss" in found["jobs"]["items"][0]["values"]):
            code, out, _ = called([*command, "--token-file", str(tmp_path / "token"), "--json"], capsys)
            assert code == 0
            found = json.loads(out)
            assert time.monotonic() < end_s
        assert found["jobs"]["items"][0]["step"] == 7

        code, out, err = called([*command, "--token-file", str(tmp_path / "token")], capsys)
        assert (code, err) == (0, "")
        assert f"coordinator · {coordinator.http_address}" in out
        assert "resnet" in out
        assert ["loss", "0.25", "0.25", "0.25"] in [line.split() for line in out.splitlines()]
        assert "\x1b" not in out


def test_a_coordinator_that_never_answered_is_an_error_with_the_cure(
    run_directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = called(["top", "--http", f"http://127.0.0.1:{free_port()}"], capsys)

    assert (code, out) == (ExitCode.UNAVAILABLE, "")
    assert "check that it is running" in err


def test_a_coordinator_that_goes_away_is_named_and_read_again_once_it_is_back(tmp_path: Path) -> None:
    port = free_port()
    first, second = serving(tmp_path, port=port), serving(tmp_path, port=port)
    source = _Coordinator(f"http://127.0.0.1:{port}", ClientSecurity(), DEADLINE_S)

    def come_back() -> None:
        report(second.__enter__(), "second-job")

    def interrupt() -> None:
        raise KeyboardInterrupt

    with terminal() as (seen, screen, clock):
        report(first.__enter__(), "first-job")
        pause = script(
            seen,
            clock,
            ("first-job", lambda: first.__exit__(None, None, None)),
            ("trying again: no coordinator answers", come_back),
            ("second-job", interrupt),
        )
        try:
            with pytest.raises(KeyboardInterrupt):
                follow(source, source.read(), screen, clock, pause=pause)
        finally:
            second.__exit__(None, None, None)
        screen.close()
        seen.read()
        assert seen.text.rindex(SHOW_CURSOR) > seen.text.rindex("second-job")


def a_run(directory: Path, **status: Any) -> RunDirectory:
    (directory / "train.py").write_text("")
    spec = RunSpec(
        name="seen", script=str(directory / "train.py"), directory=str(directory), checkpoints=str(directory / "c")
    )
    run = create(spec)
    started = RunStatus.of_this_process(now_s=1.0)
    run.write_status(msgspec.structs.replace(started, **{"state": "running", **status}))
    return run


def test_a_run_is_followed_until_its_end(run_directory: Path, tmp_path: Path) -> None:
    page = serving(tmp_path)
    coordinator = page.__enter__()
    run = a_run(run_directory, page=coordinator.http_address)
    report(coordinator, "seen")

    def end_run() -> None:
        status = run.status
        assert status is not None
        run.write_status(msgspec.structs.replace(status, state="failed", reason="rank 0 exited with code 1"))
        page.__exit__(None, None, None)

    chosen = choose_run(None, is_elsewhere=False)
    assert chosen is not None
    source = _Run(chosen, ClientSecurity(), DEADLINE_S)
    with terminal() as (seen, screen, clock):
        pause = script(seen, clock, ("training", end_run))
        end = follow(source, source.read(), screen, clock, pause=pause)
        screen.close()
        seen.read()

    assert end == "run seen failed: rank 0 exited with code 1"
    assert "run seen" in seen.text


def test_a_run_that_has_no_page_or_has_ended_is_refused_with_the_cure(run_directory: Path) -> None:
    run = a_run(run_directory)
    source = _Run(run, ClientSecurity(), DEADLINE_S)
    with pytest.raises(ConfigError, match=r"serves no page .*`strata status seen`"):
        source.read()

    assert run.status is not None
    run.write_status(msgspec.structs.replace(run.status, state="done"))
    with pytest.raises(ConfigError, match=r"not active \(done\)"):
        source.read()
    assert source.end().startswith("run seen done")


def test_the_view_ends_with_its_terminal(tmp_path: Path) -> None:
    with serving(tmp_path) as coordinator, terminal() as (_, screen, clock):
        source = _Coordinator(coordinator.http_address, ClientSecurity(), DEADLINE_S)

        assert follow(source, source.read(), screen, clock, pause=screen.close) == ""


class _Redirects(BaseHTTPRequestHandler):
    """Redirects to a path of the same server, where it records what arrives."""

    paths: ClassVar[list[str]] = []

    def do_GET(self) -> None:
        self.paths.append(self.path)
        self.send_response(302)
        self.send_header("Location", "/stolen")
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        pass


def test_the_token_does_not_follow_a_redirect() -> None:
    with HTTPServer(("127.0.0.1", 0), _Redirects) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            source = _Coordinator(f"http://127.0.0.1:{server.server_port}", ClientSecurity(token=READER), DEADLINE_S)
            with pytest.raises(CoordinatorError, match="got HTTP 302, not an answer of a coordinator"):
                source.read()
        finally:
            server.shutdown()
            thread.join()
    assert [path.split("?")[0] for path in _Redirects.paths] == ["/api/overview"]
