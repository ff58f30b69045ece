"""The command line as a process: its output and its exit codes."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from strata import cli
from strata._version import __version__
from strata.cli import coordinator as coordinator_command
from strata.cli.exit_codes import MEANINGS, ExitCode, exit_code_of
from strata.errors import BY_KIND, ConfigError

STRATA = Path(sys.executable).with_name("strata")


def strata(*args: str, cwd: Path | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
    plain = {"NO_COLOR": "1", "TERM": "dumb", "COLUMNS": "160"}
    return subprocess.run(
        [STRATA, *args],
        cwd=cwd,
        env={**os.environ, **plain, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def test_help_lists_the_commands_and_the_exit_codes() -> None:
    shown = strata("--help")

    assert shown.returncode == 0
    for command in ("coordinator", "bench", "doctor"):
        assert command in shown.stdout
    for meaning in MEANINGS.values():
        assert meaning in shown.stdout
    assert "--install-completion" in shown.stdout


@pytest.mark.parametrize(
    ("command", "flags"),
    [
        ("coordinator", ["--listen", "--http", "--state", "--config", "--json"]),
        ("bench", ["--rounds", "--quick", "--json", "--list", "--all"]),
        ("doctor", ["--json"]),
    ],
)
def test_the_help_of_a_command_names_its_flags(command: str, flags: list[str]) -> None:
    shown = strata(command, "--help")

    assert shown.returncode == 0
    assert [flag for flag in flags if flag not in shown.stdout] == []


def test_help_loads_nothing_heavy() -> None:
    look = "import sys\nfrom strata.cli import main\ntry:\n    main(['--help'])\nfinally:\n    print(*sys.modules)"
    shown = subprocess.run([sys.executable, "-c", look], capture_output=True, text=True, check=False)

    loaded = set(shown.stdout.splitlines()[-1].split())
    assert "typer" in loaded
    assert loaded & {"grpc", "sqlalchemy", "numpy", "fastapi", "torch", "uvicorn"} == set()


def test_version_prints_the_version() -> None:
    assert strata("--version").stdout == f"strata {__version__}\n"


def test_a_wrong_flag_is_a_usage_error() -> None:
    refused = strata("coordinator", "--lisen", "127.0.0.1:0")

    assert refused.returncode == ExitCode.USAGE
    assert "--listen" in refused.stderr


def test_an_unknown_command_is_a_usage_error_that_suggests_the_nearest() -> None:
    refused = strata("coordinater")

    assert refused.returncode == ExitCode.USAGE
    assert "Did you mean 'coordinator'?" in refused.stderr


def test_an_unknown_setting_in_a_file_is_a_usage_error_of_one_line(tmp_path: Path) -> None:
    (tmp_path / "bad.yaml").write_text("lease:\n  lease_sec: 3\n")
    refused = strata("coordinator", "--config", "bad.yaml", cwd=tmp_path)

    assert refused.returncode == ExitCode.USAGE
    assert refused.stderr == "error: bad.yaml: unknown setting lease.lease_sec; did you mean lease.lease_s?\n"
    assert refused.stdout == ""


def test_a_missing_config_file_is_a_usage_error(tmp_path: Path) -> None:
    refused = strata("coordinator", "--config", "absent.yaml", cwd=tmp_path)

    assert (refused.returncode, refused.stderr) == (
        ExitCode.USAGE,
        "error: absent.yaml: no such file; check the path\n",
    )


def test_a_coordinator_yaml_in_the_current_directory_is_used_and_announced(tmp_path: Path) -> None:
    (tmp_path / "coordinator.yaml").write_text("network: {transport: rdma, device: mlx5_0, port: 1}\n")
    refused = strata("coordinator", cwd=tmp_path)

    assert refused.returncode == ExitCode.USAGE
    assert refused.stderr.startswith("using ./coordinator.yaml\nerror: network.transport='rdma' is not available yet")


def test_a_traceback_is_shown_only_on_request(tmp_path: Path) -> None:
    asked = strata("coordinator", "--config", "absent.yaml", cwd=tmp_path, STRATA_TRACEBACK="1")

    assert "Traceback" in asked.stderr
    assert "Traceback" not in strata("coordinator", "--config", "absent.yaml", cwd=tmp_path).stderr


def test_flags_override_the_file(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("listen: 127.0.0.1:1\nstate: memory\n")
    resolved = coordinator_command.resolve(file, {"listen": "127.0.0.1:2", "http": None, "state": None})

    assert (resolved.listen, resolved.http, resolved.state) == ("127.0.0.1:2", "127.0.0.1:51051", "memory")


def test_the_coordinator_prints_its_addresses_as_text_and_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    addresses = SimpleNamespace(grpc="127.0.0.1:50051", http="", state="memory", leads=True)

    coordinator_command._announce(addresses, as_json=True)  # type: ignore[arg-type]
    assert json.loads(capsys.readouterr().out) == vars(addresses)
    coordinator_command._announce(addresses, as_json=False)  # type: ignore[arg-type]
    assert "HTTP   off" in capsys.readouterr().out.splitlines()[2]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_coordinator_serves_until_it_is_terminated(number: signal.Signals, tmp_path: Path) -> None:
    command = [STRATA, "coordinator", "--listen", "127.0.0.1:0", "--http", "off", "--state", "memory", "--json"]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            addresses = json.loads(process.stdout.readline())
            host, _, port = addresses["grpc"].rpartition(":")
            socket.create_connection((host, int(port)), timeout=5).close()
            process.send_signal(number)
            assert process.wait(timeout=20) == ExitCode.OK
        finally:
            process.kill()
    assert addresses["http"] == ""


def test_bench_lists_its_names_and_refuses_unknown_ones() -> None:
    assert "shards" in strata("bench", "--list").stdout.split()

    refused = strata("bench", "shard")
    assert refused.returncode == ExitCode.USAGE
    assert "did you mean 'shards'?" in refused.stderr


def test_bench_takes_exactly_one_of_name_list_and_all() -> None:
    for args in ([], ["--all", "--list"], ["ring", "--all"]):
        assert strata("bench", *args).returncode == ExitCode.USAGE


@pytest.mark.slow  # imports all extras
def test_doctor_prints_json(tmp_path: Path) -> None:
    examined = strata("doctor", "--json", cwd=tmp_path, XDG_STATE_HOME=str(tmp_path))

    report = json.loads(examined.stdout)
    assert (examined.returncode, report["ok"]) == (0, True)
    assert {"name", "status", "detail", "cure", "essential"} == report["checks"][0].keys()


@pytest.mark.slow
def test_doctor_fails_if_the_state_directory_is_not_writable() -> None:
    examined = strata("doctor", XDG_STATE_HOME="/proc/nowhere")

    assert examined.returncode == ExitCode.FAILED
    assert "✗  state directory" in examined.stdout


def test_every_error_has_an_exit_code_that_the_help_explains() -> None:
    for kind in BY_KIND.values():
        code = exit_code_of(kind("x"))
        assert code in MEANINGS
        assert code is not ExitCode.OK
    assert exit_code_of(ConfigError("x")) is ExitCode.USAGE
    assert exit_code_of(BY_KIND["CoordinatorUnavailable"]("x")) is ExitCode.UNAVAILABLE
    assert exit_code_of(BY_KIND["JournalDamaged"]("x")) is ExitCode.STATE_DAMAGED
    assert exit_code_of(BY_KIND["JournalLocked"]("x")) is ExitCode.STATE_BUSY


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (KeyboardInterrupt(), ExitCode.INTERRUPTED, ""),
        (ConfigError("two\nlines"), ExitCode.USAGE, "error: two lines\n"),
        (ZeroDivisionError("oh"), ExitCode.FAILED, "error: unexpected ZeroDivisionError: oh; set STRATA_TRACEBACK=1"),
    ],
)
def test_an_error_becomes_one_line_and_an_exit_code(
    error: BaseException,
    code: ExitCode,
    line: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(**_: object) -> None:
        raise error

    monkeypatch.setattr(cli, "app", fail)
    monkeypatch.delenv("STRATA_TRACEBACK", raising=False)
    with pytest.raises(SystemExit) as ended:
        cli.main([])

    assert ended.value.code == code
    shown = capsys.readouterr().err
    assert shown.startswith(line)
    assert shown.count("\n") == (1 if line else 0)
