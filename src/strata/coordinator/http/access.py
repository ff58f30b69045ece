"""Who may send a request: by a token in its header, or by a session that an extension has opened for a browser.

A browser attaches cookies to requests that a page of another site makes, so a request that changes something must also
carry a header that such a page cannot send without permission, and must not name another origin. Requests with a token
of their own need neither: no browser adds a token by itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from fastapi import APIRouter, Depends, Request

from strata.errors import PermissionRefused
from strata.transport.tokens import METADATA_KEY, Role, bearer, require

if TYPE_CHECKING:
    from collections.abc import Callable

    from strata.transport.tokens import Guard

CSRF_HEADER = "x-strata-request"
SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
_OWN_SITES = frozenset({"same-origin", "none"})


class Access:
    def __init__(self, guard: Guard, hosts: tuple[str, ...] = ()) -> None:
        """`hosts`: names other than that in `Host` under which pages of this server may be opened, as by a proxy."""
        self.guard = guard
        self._hosts = frozenset(host.lower() for host in hosts)
        self.token_of_session: Callable[[Request], str] = lambda _: ""
        """Returns the token behind a request's session; empty if it has none."""

    def role_of(self, request: Request) -> Role:
        """Return the role of the caller.

        Raises:
            Unauthenticated: Neither its token nor its session is valid.
        """
        header = request.headers.get(METADATA_KEY, "")
        if not header and (token := self.token_of_session(request)):
            header = bearer(token)
        return self.guard.role_of(header)

    async def reader(self, request: Request) -> None:
        require(self.role_of(request), Role.READER, request.url.path)

    async def same_origin(self, request: Request) -> None:
        """Refuse requests that a page of another site may have made.

        Raises:
            PermissionRefused: With what is missing.
        """
        if request.method in SAFE_METHODS or METADATA_KEY in request.headers:
            return
        if CSRF_HEADER not in request.headers:
            raise PermissionRefused(f"the header {CSRF_HEADER} is missing; send it with any value", field=CSRF_HEADER)
        site = request.headers.get("sec-fetch-site", "same-origin")
        origin = request.headers.get("origin")
        if site not in _OWN_SITES or (origin is not None and not self._is_own(origin, request)):
            raise PermissionRefused(
                "the request comes from a page of another site; if a proxy serves this page under another name, add "
                "that name to security.hosts in coordinator.yaml",
                field="Origin",
            )

    def _is_own(self, origin: str, request: Request) -> bool:
        try:
            parts = urlsplit(origin)
            host = parts.hostname or ""
        except ValueError:
            return False
        if parts.scheme not in ("http", "https") or not host:
            return False
        return parts.netloc.lower() == request.headers.get("host", "").lower() or host in self._hosts


@dataclass(frozen=True, slots=True)
class Doors:
    """The routers of the HTTP app, for extensions."""

    access: Access
    guarded: APIRouter
    """Requests are rate-limited, must have the role `reader` or above, and must not come from another site."""
    open: APIRouter
    """Requests are rate-limited only."""
    limit_rate: Callable[[Request], None]
    """For what is served without a router. Raises `LimitExceeded`."""


def make_doors(
    guard: Guard,
    admit: Callable[[Request], None],
    *,
    hosts: tuple[str, ...] = (),
    problems: dict[int | str, dict[str, Any]],
) -> Doors:
    """Return routers that check every request.

    Args:
        admit: Raises `LimitExceeded` if the machine of a request sends too many.
        hosts: See `Access`.
        problems: The errors of routes, for their description.
    """
    access = Access(guard, hosts)

    async def limit_rate(request: Request) -> None:
        admit(request)

    checks = [Depends(limit_rate), Depends(access.reader), Depends(access.same_origin)]
    guarded = APIRouter(dependencies=checks, responses=problems)
    unguarded = APIRouter(dependencies=[Depends(limit_rate)], responses={429: problems[429]})
    return Doors(access, guarded, unguarded, admit)
