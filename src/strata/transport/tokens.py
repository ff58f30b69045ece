"""Who may ask for what: tokens with roles.

A token is a secret line of text that a caller sends with every connection. The server knows several, each with a role;
where they come from is read again when it changes, so that tokens are rotated without a restart: add the new one, let
the clients take it, remove the old one. Tokens are compared in constant time and are never put into a message or a log.
"""

from __future__ import annotations

import enum
import hmac
import logging
import os
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from strata.errors import ConfigError, PermissionRefused, Unauthenticated

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

log = logging.getLogger(__name__)

TOKEN_VARIABLE = "STRATA_TOKEN"  # noqa: S105 - a name, not a secret
TOKENS_VARIABLE = "STRATA_TOKENS"
MIN_TOKEN_LENGTH = 16
METADATA_KEY = "authorization"
_SCHEME = "Bearer "


class Role(enum.IntEnum):
    """Each may do what the ones before it may."""

    READER = 1
    """Looks: lists, status, metrics, events."""
    WORKER = 2
    """Takes part: registers, beats, acknowledges, waits."""
    ADMIN = 3
    """Commands."""


@dataclass(frozen=True, slots=True)
class Grant:
    role: Role
    token: bytes

    def __repr__(self) -> str:
        return f"Grant({self.role.name}, …)"


def parse_grants(lines: Iterable[str], *, source: str) -> tuple[Grant, ...]:
    """`ROLE TOKEN` on each line; blank lines and those that begin with # are passed over."""
    grants = []
    for number, line in enumerate(lines, start=1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        if len(words) != 2 or words[0].upper() not in Role.__members__:
            raise ConfigError(f"{source}, line {number}: write ROLE TOKEN, with worker, reader or admin as the role")
        if len(words[1]) < MIN_TOKEN_LENGTH:
            raise ConfigError(
                f"{source}, line {number}: the token has under {MIN_TOKEN_LENGTH} characters; "
                "make one with: openssl rand -hex 32"
            )
        grants.append(Grant(Role[words[0].upper()], words[1].encode()))
    if not grants:
        raise ConfigError(f"{source} holds no token; write lines of ROLE TOKEN")
    return tuple(grants)


class TokenFile:
    """The grants in a file, read again when the file changes. A change that cannot be read keeps the last good ones."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seen: tuple[int, int] | None = None
        self._grants: tuple[Grant, ...] = ()
        self.problem = ""
        """Why the newest contents are not used; empty if they are."""
        self._reload(strict=True)

    def grants(self) -> tuple[Grant, ...]:
        self._reload(strict=False)
        return self._grants

    __call__ = grants

    def _reload(self, *, strict: bool) -> None:
        try:
            stat = self._path.stat()
            if (stat.st_mtime_ns, stat.st_size) == self._seen:
                return
            grants = parse_grants(self._path.read_text().splitlines(), source=str(self._path))
        except (OSError, UnicodeError, ConfigError) as error:
            if strict:
                raise (
                    error
                    if isinstance(error, ConfigError)
                    else ConfigError(f"the tokens cannot be read from {self._path}: {error}", field="security.tokens")
                ) from error
            if not isinstance(error, OSError):  # what can be read and not used is not read again until it changes
                self._seen = (stat.st_mtime_ns, stat.st_size)
            self._note(str(error))
            return
        self._grants, self._seen = grants, (stat.st_mtime_ns, stat.st_size)
        self._note("")

    def _note(self, problem: str) -> None:
        """Said once, and not for every caller."""
        if problem and problem != self.problem:
            log.warning("the tokens of before stay in force, for the new ones cannot be used: %s", problem)
        elif self.problem and not problem:
            log.warning("the tokens of %s are in force", self._path)
        self.problem = problem


def grants_from(path: str) -> Callable[[], tuple[Grant, ...]] | None:
    """Where the server's tokens come from: a file, or the environment (`worker TOKEN,admin TOKEN`); None: nowhere."""
    if path:
        return TokenFile(Path(path).expanduser())
    text = os.environ.get(TOKENS_VARIABLE, "")
    if not text:
        return None
    grants = parse_grants(text.split(","), source=TOKENS_VARIABLE)
    return lambda: grants


class Guard:
    """Decides whether a caller may do a thing. Without grants everybody may do everything."""

    def __init__(self, grants: Callable[[], tuple[Grant, ...]] | None = None) -> None:
        self._grants = grants

    @property
    def is_open(self) -> bool:
        return self._grants is None

    def file_problem(self) -> str | None:
        """Why the newest contents of the file of tokens are not used: empty if they are, None if there is no file."""
        if not isinstance(self._grants, TokenFile):
            return None
        self._grants()  # it may have changed since the last caller came
        return self._grants.problem

    def role_of(self, authorization: str) -> Role:
        """
        Raises:
            Unauthenticated: No token, or not one of ours.
        """
        if self._grants is None:
            return Role.ADMIN
        if not authorization.startswith(_SCHEME):
            raise Unauthenticated(f"a token is needed; set {TOKEN_VARIABLE}, or send '{METADATA_KEY}: Bearer TOKEN'")
        offered = authorization.removeprefix(_SCHEME).strip().encode()
        role: Role | None = None
        for grant in self._grants():
            if hmac.compare_digest(grant.token, offered):  # no early end: the time must not tell which came near
                role = max(role or grant.role, grant.role)
        if role is None:
            raise Unauthenticated("the token is not known here; was it rotated? ask whoever runs the coordinator")
        return role


def require(role: Role, needed: Role, what: str) -> None:
    if role < needed:
        raise refused(role, needed, what)


def refused(role: Role, needed: Role, what: str) -> PermissionRefused:
    return PermissionRefused(
        f"{what} needs the role {needed.name.lower()}, this token has {role.name.lower()}; use another token"
    )


def write_tokens(directory: Path) -> list[Path]:
    """New tokens, one a role: all in `tokens` for the server, and each alone in a file for clients."""
    made = {role.name.lower(): secrets.token_hex(32) for role in Role}
    files = {"tokens": "".join(f"{role} {token}\n" for role, token in made.items())}
    files |= {f"{role}.token": f"{token}\n" for role, token in made.items()}
    standing = [name for name in files if (directory / name).exists()]
    if standing:
        raise ConfigError(f"{directory} holds {', '.join(standing)} already; name another directory, or remove them")
    for name, content in files.items():
        fd = os.open(directory / name, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
        with os.fdopen(fd, "w") as file:
            file.write(content)
    return [directory / name for name in files]


def bearer(token: str) -> str:
    return _SCHEME + token
