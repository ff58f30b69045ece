"""Errors as answers: one shape with the names of gRPC, and one table of HTTP statuses."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from strata import errors
from strata.coordinator.http import models as m

if TYPE_CHECKING:
    from fastapi import FastAPI, Request, Response

STATUS_OF: dict[type[errors.StrataError], int] = {
    errors.StrataError: 500,
    errors.InvalidArgument: 422,
    errors.LimitExceeded: 429,
    errors.CoordinatorError: 409,
    errors.UnknownJob: 404,
    errors.UnknownWorker: 404,
    errors.UnknownDataset: 404,
    errors.Unauthenticated: 401,
    errors.PermissionRefused: 403,
    errors.CoordinatorUnavailable: 503,
    errors.JournalError: 503,
}
"""An error has the status of its nearest ancestor in this table."""
_MEANINGS = {
    401: "The token is missing or unknown.",
    403: "The role of the token does not permit the request.",
    404: "The job does not exist.",
    422: "A parameter is invalid.",
    429: "More requests per second from this machine than limits.max_http_requests_per_s.",
    503: "The journal cannot be read or written, or another coordinator leads.",
}
_HEADERS = {401: {"WWW-Authenticate": "Bearer"}, 429: {"Retry-After": "1"}}
PROBLEMS: dict[int | str, dict[str, Any]] = {
    code: {"model": m.ErrorBody, "description": message} for code, message in _MEANINGS.items()
}
"""For the description of routes."""


def add_handlers(app: FastAPI) -> None:
    """Answer every error of a request in the same shape."""
    app.add_exception_handler(errors.StrataError, _refuse)
    app.add_exception_handler(RequestValidationError, _refuse_parameter)
    app.add_exception_handler(HTTPException, _refuse_request)


def error_response(
    code: int, kind: str, message: str, field: str = "", headers: dict[str, str] | None = None
) -> JSONResponse:
    body = m.ErrorBody(error=m.Problem(kind=kind, message=message, field=field))
    return JSONResponse(body.model_dump(), status_code=code, headers=headers or _HEADERS.get(code))


def refuse_host(host: str) -> JSONResponse:
    message = (
        f"Host: {host[:100]!r} is not a name of this machine, so a page of another site may have sent the request; "
        "if it is one, add it to security.hosts in coordinator.yaml"
    )
    return error_response(421, "RequestRefused", message, "Host")


async def _refuse(_request: Request, error: Exception) -> Response:
    assert isinstance(error, errors.StrataError)
    code = next(STATUS_OF[kind] for kind in type(error).__mro__ if kind in STATUS_OF)
    return error_response(code, type(error).__name__, error.message, error.field)


async def _refuse_parameter(_request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    field = next(each for each in reversed(first["loc"]) if isinstance(each, str))  # numbers are places in a text
    return error_response(422, "InvalidArgument", f"{field}: {first['msg']}; see /openapi.json", field)


async def _refuse_request(_request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    headers = dict(error.headers) if error.headers else None
    return error_response(error.status_code, "RequestRefused", f"{error.detail}; see /openapi.json", "", headers)
