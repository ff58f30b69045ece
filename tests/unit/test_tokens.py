"""Tokens: parsing, authentication, and that no secret is printed."""

from __future__ import annotations

import hmac
import os
import pickle
from pathlib import Path

import pytest

from strata.errors import ConfigError, PermissionRefused, Unauthenticated
from strata.transport import tokens
from strata.transport.credentials import ClientSecurity
from strata.transport.tokens import Grant, Guard, Role, TokenFile, bearer, grants_from, parse_grants, require

WORKER, READER, ADMIN = "w" * 32, "r" * 32, "a" * 32
LINES = ["# who may come in", "", f"worker {WORKER}", f"  reader   {READER}  ", f"ADMIN {ADMIN}"]


def guard() -> Guard:
    return Guard(lambda: parse_grants(LINES, source="tokens"))


def rewrite(path: Path, text: str) -> None:
    """Replace the file as a tool would: another file with another modification time."""
    new = path.with_suffix(".new")
    new.write_text(text)
    os.utime(new, ns=(0, path.stat().st_mtime_ns + 1_000_000))
    new.rename(path)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "tokens"
    path.write_text(f"worker {WORKER}\n")
    return path


def test_comments_and_blank_lines_are_skipped_and_roles_are_case_insensitive() -> None:
    assert [g.role for g in parse_grants(LINES, source="tokens")] == [Role.WORKER, Role.READER, Role.ADMIN]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (WORKER, "line 1: expected ROLE TOKEN"),
        (f"king {WORKER}", "line 1: expected ROLE TOKEN"),
        (f"worker {WORKER} {READER}", "line 1: expected ROLE TOKEN"),
        ("worker secret-of-15-ch", "fewer than 16 characters"),
        ("# nothing", "contains no token"),
    ],
)
def test_a_wrong_line_is_refused_with_its_number_and_without_its_token(line: str, message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse_grants([line], source="tokens")
    assert message in str(refused.value)
    assert not any(secret in str(refused.value) for secret in (WORKER, READER, "secret-of"))


def test_each_token_has_its_role_and_the_highest_of_duplicates_wins() -> None:
    assert [guard().role_of(bearer(t)) for t in (READER, WORKER, ADMIN)] == list(Role)
    twice = Guard(lambda: parse_grants([f"admin {WORKER}", f"reader {WORKER}"], source="tokens"))
    assert twice.role_of(bearer(WORKER)) is Role.ADMIN


@pytest.mark.parametrize(
    "sent", ["", WORKER, "Basic " + WORKER, "Bearer", "Bearer ", bearer("x" * 32), bearer("é" * 16)]
)
def test_an_unknown_token_is_refused_and_not_repeated(sent: str) -> None:
    with pytest.raises(Unauthenticated) as refused:
        guard().role_of(sent)
    assert not any(secret in str(refused.value) for secret in (WORKER, "x" * 32, "é" * 16))


def test_every_caller_may_do_everything_without_tokens() -> None:
    assert Guard().is_open
    assert Guard().role_of("") is Role.ADMIN


def test_every_token_is_compared_in_constant_time_even_after_a_match(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[bytes] = []
    in_constant_time = hmac.compare_digest

    def compare(ours: bytes, theirs: bytes) -> bool:
        compared.append(ours)
        return in_constant_time(ours, theirs)

    monkeypatch.setattr(hmac, "compare_digest", compare)
    assert guard().role_of(bearer(WORKER)) is Role.WORKER
    assert compared == [t.encode() for t in (WORKER, READER, ADMIN)]


def test_a_role_includes_the_lower_roles_and_no_higher_one() -> None:
    require(Role.ADMIN, Role.READER, "ListJobs")
    require(Role.WORKER, Role.WORKER, "AckShards")
    with pytest.raises(PermissionRefused, match="SendCommand requires the role admin; this token has worker"):
        require(Role.WORKER, Role.ADMIN, "SendCommand")


def test_a_changed_file_applies_from_the_next_caller_on(path: Path) -> None:
    file = TokenFile(path)
    guard_ = Guard(file.grants)
    rewrite(path, f"worker {WORKER}\nworker {READER}\n")
    assert guard_.role_of(bearer(READER)) is guard_.role_of(bearer(WORKER)) is Role.WORKER
    rewrite(path, f"worker {READER}\n")
    with pytest.raises(Unauthenticated, match="rotated"):
        guard_.role_of(bearer(WORKER))


@pytest.mark.parametrize("bad", ["", "worker\n", "worker short\n", "king " + ADMIN])
def test_invalid_contents_keep_the_old_tokens_and_give_the_reason(path: Path, bad: str) -> None:
    file = TokenFile(path)
    rewrite(path, bad)
    assert [g.token for g in file.grants()] == [WORKER.encode()]
    assert str(path) in file.problem
    assert ADMIN not in file.problem
    rewrite(path, f"admin {ADMIN}\n")
    assert [g.role for g in file.grants()] == [Role.ADMIN]
    assert file.problem == ""


def test_invalid_contents_are_logged_once_not_for_every_caller(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = TokenFile(path)
    guard_ = Guard(file)
    assert guard_.file_problem() == ""
    rewrite(path, f"king {ADMIN}\n")
    for _ in range(3):
        assert guard_.role_of(bearer(WORKER)) is Role.WORKER
        assert "line 1" in (guard_.file_problem() or "")
    rewrite(path, f"worker {WORKER}\n\n")
    assert guard_.file_problem() == ""
    assert [record.levelname for record in caplog.records] == ["WARNING", "WARNING"]
    first, second = [record.getMessage() for record in caplog.records]
    assert first.startswith("the new tokens are invalid")
    assert str(path) in first
    assert second == f"the tokens in {path} are in force"
    assert ADMIN not in caplog.text


def test_the_file_problem_is_none_without_a_token_file() -> None:
    assert Guard().file_problem() is None
    assert Guard(lambda: ()).file_problem() is None


def test_a_file_that_vanishes_keeps_the_old_tokens(path: Path) -> None:
    file = TokenFile(path)
    path.unlink()
    assert len(file.grants()) == 1
    assert "No such file" in file.problem


def test_a_missing_file_is_refused_at_startup(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read the tokens"):
        TokenFile(tmp_path / "none")


def test_tokens_come_from_the_environment_if_no_file_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("STRATA_TOKENS", raising=False)
    assert grants_from("") is None
    monkeypatch.setenv("STRATA_TOKENS", f"worker {WORKER},admin {ADMIN}")
    grants = grants_from("")
    assert grants is not None
    assert [g.role for g in grants()] == [Role.WORKER, Role.ADMIN]


def test_no_repr_shows_a_token(path: Path) -> None:
    grant = Grant(Role.WORKER, WORKER.encode())
    security = ClientSecurity(token=WORKER)
    shown = [
        repr(grant),
        str(grant),
        f"{(grant,)}",
        repr(security),
        str(security),
        repr(TokenFile(path)),
        repr(guard()),
    ]
    assert [text for text in shown if WORKER in text] == []


def test_new_tokens_are_private_and_never_overwritten(tmp_path: Path) -> None:
    files = tokens.write_tokens(tmp_path)
    assert {p.name for p in files} == {"tokens", "reader.token", "worker.token", "admin.token"}
    assert {p.stat().st_mode & 0o777 for p in files} == {0o600}
    guard_ = Guard(TokenFile(tmp_path / "tokens").grants)
    for role in Role:
        sent = ClientSecurity(token_file=str(tmp_path / f"{role.name.lower()}.token")).metadata()
        assert guard_.role_of(dict(sent)["authorization"]) is role
    with pytest.raises(ConfigError, match="already"):
        tokens.write_tokens(tmp_path)


def test_explicit_settings_win_over_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a").write_text(f"{ADMIN}\n")
    (tmp_path / "r").write_text(f"{READER}\n")
    monkeypatch.delenv("STRATA_TOKEN", raising=False)
    monkeypatch.setenv("STRATA_TOKEN_FILE", str(tmp_path / "a"))
    assert ClientSecurity().metadata() == (("authorization", f"Bearer {ADMIN}"),)
    monkeypatch.setenv("STRATA_TOKEN", WORKER)
    assert ClientSecurity().metadata() == (("authorization", f"Bearer {WORKER}"),)
    assert ClientSecurity(token_file=str(tmp_path / "r")).metadata() == (("authorization", f"Bearer {READER}"),)


@pytest.mark.parametrize("token", ["two words of it", "line\nbreak", "é" * 20])
def test_a_token_that_cannot_be_sent_is_refused_and_not_shown(token: str) -> None:
    with pytest.raises(ConfigError) as refused:
        ClientSecurity(token=token).metadata()
    assert token not in str(refused.value)
    assert pickle.loads(pickle.dumps(refused.value)).args == refused.value.args
