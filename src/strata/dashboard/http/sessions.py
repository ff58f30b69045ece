"""Sessions of browsers: a random id in a cookie stands for the token that the page sent once.

The token is kept so that each request checks it again: removing it from the token file ends its sessions. Sessions live
in memory, so a restarted coordinator asks for the token again.
"""

from __future__ import annotations

import hashlib
import secrets
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable

MAX_SESSIONS = 1_000
"""The oldest ends when another one begins."""
LIFETIME_S = 12 * 3_600.0
ID_BYTES = 32


class Session(NamedTuple):
    token: str
    until_s: float

    def __repr__(self) -> str:
        return f"Session(…, until_s={self.until_s})"


class Sessions:
    def __init__(self, now_s: Callable[[], float], *, max_sessions: int = MAX_SESSIONS) -> None:
        self._now_s = now_s
        self._max_sessions = max_sessions
        self._by_digest: dict[bytes, Session] = {}
        """By the digest of the id, oldest first: the time of a lookup reveals nothing about an id."""

    def __len__(self) -> int:
        return len(self._by_digest)

    def begin(self, token: str) -> str:
        """Return the id of a new session."""
        self._drop_expired()
        while len(self._by_digest) >= self._max_sessions:
            del self._by_digest[next(iter(self._by_digest))]
        session_id = secrets.token_urlsafe(ID_BYTES)
        self._by_digest[_digest(session_id)] = Session(token, self._now_s() + LIFETIME_S)
        return session_id

    def token_of(self, session_id: str) -> str:
        """Return the token of a session; empty if it does not exist or has expired."""
        found = self._by_digest.get(_digest(session_id))
        return found.token if found is not None and found.until_s > self._now_s() else ""

    def end(self, session_id: str) -> None:
        self._by_digest.pop(_digest(session_id), None)

    def _drop_expired(self) -> None:
        now_s = self._now_s()
        for key in [key for key, session in self._by_digest.items() if session.until_s <= now_s]:
            del self._by_digest[key]


def _digest(session_id: str) -> bytes:
    return hashlib.sha256(session_id.encode("utf-8", "surrogatepass")).digest()
