"""Login and logout: the page exchanges a token for a session in a cookie that no script can read."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Annotated, Any

from fastapi import Depends, Request, Response
from pydantic import ValidationError

from strata._version import __version__
from strata.coordinator.http.access import CSRF_HEADER
from strata.coordinator.http.models import ErrorBody
from strata.dashboard.http import models as m
from strata.dashboard.http.sessions import LIFETIME_S
from strata.errors import InvalidArgument, LimitExceeded, Unauthenticated
from strata.transport.tokens import bearer

if TYPE_CHECKING:
    from strata.coordinator.http.access import Access, Doors
    from strata.dashboard.http.sessions import Sessions

COOKIE = "strata_session"
MAX_BODY_BYTES = 4_096
BODY_WITHIN_S = 10.0
_PROBLEMS: dict[int | str, dict[str, Any]] = {
    401: {"model": ErrorBody, "description": "The token is unknown."},
    403: {"model": ErrorBody, "description": f"The header {CSRF_HEADER} is missing, or the page is of another site."},
    422: {"model": ErrorBody, "description": "The body is not a token, or no login is needed."},
    429: {"model": ErrorBody, "description": "Too many requests per second, or the body is too large."},
}
_BODY = {
    "requestBody": {"required": True, "content": {"application/json": {"schema": m.LoginRequest.model_json_schema()}}}
}


def add_login(doors: Doors, sessions: Sessions) -> None:
    access = doors.access
    access.token_of_session = lambda request: sessions.token_of(request.cookies.get(cookie_name(request), ""))
    same_origin = [Depends(access.same_origin)]

    @doors.open.get("/api/session")
    async def session(request: Request) -> m.SessionInfo:
        """Return whether the page must log in first. Needs no token."""
        role = role_name(access, request)
        return m.SessionInfo(login_required=role is None, role=role, version=__version__, csrf_header=CSRF_HEADER)

    @doors.open.post("/api/login", dependencies=same_origin, responses=_PROBLEMS, openapi_extra=_BODY)
    async def login(request: Request, response: Response, body: Annotated[bytes, Depends(small_body)]) -> m.LoginAnswer:
        """Exchange a token for a session cookie."""
        if access.guard.is_open:
            raise InvalidArgument("this server has no tokens, so no login is needed", field="token")
        token = _token(body)
        role = access.guard.role_of(bearer(token))
        _end(request, sessions)
        response.set_cookie(
            cookie_name(request),
            sessions.begin(token),
            max_age=int(LIFETIME_S),
            path="/",
            secure=is_secure(request),
            httponly=True,
            samesite="strict",
        )
        return m.LoginAnswer(role=_name(role.name), expires_s=LIFETIME_S)

    @doors.open.post("/api/logout", dependencies=same_origin, responses={403: _PROBLEMS[403]}, status_code=204)
    async def logout(request: Request, response: Response) -> None:
        """End the session of the cookie. Without one, nothing happens."""
        _end(request, sessions)
        response.delete_cookie(
            cookie_name(request), path="/", secure=is_secure(request), httponly=True, samesite="strict"
        )


def role_name(access: Access, request: Request) -> m.RoleName | None:
    """Return the role of a request; None if it must log in first."""
    try:
        return _name(access.role_of(request).name)
    except Unauthenticated:
        return None


def _name(role: str) -> m.RoleName:
    name = role.lower()
    assert name in ("reader", "worker", "admin")
    return name  # type: ignore[return-value]  # the roles of `tokens` are these three


def _token(body: bytes) -> str:
    try:
        return m.LoginRequest.model_validate_json(body).token.get_secret_value().strip()
    except ValidationError as error:  # its text would repeat the input, which may be a token
        first = error.errors(include_input=False, include_url=False, include_context=False)[0]
        raise InvalidArgument(f'the body must be {{"token": "…"}}: {first["msg"]}', field="token") from None


def _end(request: Request, sessions: Sessions) -> None:
    sessions.end(request.cookies.get(cookie_name(request), ""))


def is_secure(request: Request) -> bool:
    return request.url.scheme == "https"


def cookie_name(request: Request) -> str:
    """Return the name of the cookie. Cookies do not know ports, and several coordinators may serve one machine; the
    prefix makes browsers refuse a cookie that another host or a plain connection set.
    """
    server = request.scope.get("server") or ("", 0)
    return f"{'__Host-' if is_secure(request) else ''}{COOKIE}_{server[1]}"


async def small_body(request: Request) -> bytes:
    """Return the body of a request, which anyone may send: bounded in size and time."""
    body = b""
    try:
        async with asyncio.timeout(BODY_WITHIN_S):
            async for piece in request.stream():
                body += piece
                if len(body) > MAX_BODY_BYTES:
                    raise LimitExceeded(f"the body has more than {MAX_BODY_BYTES} bytes; send only the token")
    except TimeoutError:
        raise InvalidArgument(f"the body did not arrive within {BODY_WITHIN_S} s", field="token") from None
    return body
