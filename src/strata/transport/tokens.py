"""Authentication and authorisation: tokens with roles.

A client sends a token, a secret string, with every connection. The server has several, each with a role, and reloads
them when their file changes. To rotate tokens without a restart, add the new token, switch the clients, and remove the
old one. Tokens are compared in constant time and never appear in a message or log.
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
    """Each role includes the permissions of the roles before it."""

    READER = 1
    """May read lists, status, metrics and events."""
    WORKER = 2
    """May register, send heartbeats, acknowledge shards and wait at barriers."""
    ADMIN = 3
    """May send commands."""


@dataclass(frozen=True, slots=True)
class Grant:
    role: Role
    token: bytes

    def __repr__(self) -> str:
        return f"Grant({self.role.name}, …)"


def parse_grants(lines: Iterable[str], *, source: str) -> tuple[Grant, ...]:
    """Parse lines of `ROLE TOKEN`; skip blank lines and lines that start with #."""
    grants = []
    for number, line in enumerate(lines, start=1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        if len(words) != 2 or words[0].upper() not in Role.__members__:
            raise ConfigError(f"{source}, line {number}: expected ROLE TOKEN, with the role worker, reader or admin")
        if len(words[1]) < MIN_TOKEN_LENGTH:
            raise ConfigError(
                f"{source}, line {number}: the token has fewer than {MIN_TOKEN_LENGTH} characters; "
                "create one with: openssl rand -hex 32"
            )
        grants.append(Grant(Role[words[0].upper()], words[1].encode()))
    if not grants:
        raise ConfigError(f"{source} contains no token; write lines of ROLE TOKEN")
    return tuple(grants)


class TokenFile:
    """The grants in a file, reloaded when the file changes. If the new contents are invalid, the previous grants
    stay."""

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
                    else ConfigError(f"cannot read the tokens from {self._path}: {error}", field="security.tokens")
                ) from error
            if not isinstance(error, OSError):  # do not parse invalid contents again until they change
                self._seen = (stat.st_mtime_ns, stat.st_size)
            self._note(str(error))
            return
        self._grants, self._seen = grants, (stat.st_mtime_ns, stat.st_size)
        self._note("")

    def _note(self, problem: str) -> None:
        """Log each problem once, not for every caller."""
        if problem and problem != self.problem:
            log.warning("the new tokens are invalid, so the previous ones stay in force: %s", problem)
        elif self.problem and not problem:
            log.warning("the tokens in %s are in force", self._path)
        self.problem = problem


def grants_from(path: str) -> Callable[[], tuple[Grant, ...]] | None:
    """Return the source of the server's tokens: a file, the environment (`worker TOKEN,admin TOKEN`), or None without
    either.
    """
    if path:
        return TokenFile(Path(path).expanduser())
    text = os.environ.get(TOKENS_VARIABLE, "")
    if not text:
        return None
    grants = parse_grants(text.split(","), source=TOKENS_VARIABLE)
    return lambda: grants


class Guard:
    """Decides what a caller may do. Without grants, every caller may do everything."""

    def __init__(self, grants: Callable[[], tuple[Grant, ...]] | None = None) -> None:
        self._grants = grants

    @property
    def is_open(self) -> bool:
        return self._grants is None

    def file_problem(self) -> str | None:
        """Why the newest contents of the token file are not used: empty if they are, None without a file."""
        if not isinstance(self._grants, TokenFile):
            return None
        self._grants()  # the file may have changed since the last call
        return self._grants.problem

    def role_of(self, authorization: str) -> Role:
        """Return the role of the token in an `Authorization` header.

        Raises:
            Unauthenticated: The token is missing or unknown.
        """
        if self._grants is None:
            return Role.ADMIN
        if not authorization.startswith(_SCHEME):
            raise Unauthenticated(f"the token is missing; set {TOKEN_VARIABLE} or send '{METADATA_KEY}: Bearer TOKEN'")
        offered = authorization.removeprefix(_SCHEME).strip().encode()
        role: Role | None = None
        for grant in self._grants():
            if hmac.compare_digest(grant.token, offered):  # no early exit: timing must not reveal a near match
                role = max(role or grant.role, grant.role)
        if role is None:
            raise Unauthenticated("the token is unknown; if it was rotated, use the new one")
        return role


def require(role: Role, needed: Role, what: str) -> None:
    if role < needed:
        raise refused(role, needed, what)


def refused(role: Role, needed: Role, what: str) -> PermissionRefused:
    return PermissionRefused(
        f"{what} requires the role {needed.name.lower()}; this token has {role.name.lower()}; use another token"
    )


def write_tokens(directory: Path) -> list[Path]:
    """Create one token per role: all of them in `tokens` for the server, and each in its own file for clients."""
    made = {role.name.lower(): secrets.token_hex(32) for role in Role}
    files = {"tokens": "".join(f"{role} {token}\n" for role, token in made.items())}
    files |= {f"{role}.token": f"{token}\n" for role, token in made.items()}
    existing = [name for name in files if (directory / name).exists()]
    if existing:
        raise ConfigError(f"{directory} already contains {', '.join(existing)}; remove them or choose another")
    for name, content in files.items():
        fd = os.open(directory / name, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
        with os.fdopen(fd, "w") as file:
            file.write(content)
    return [directory / name for name in files]


def bearer(token: str) -> str:
    return _SCHEME + token
