"""Ask the HTTP API of a coordinator, for commands: with token and certificates, without redirects, within limits."""

import http.client
import json
import os
import ssl
import urllib.error
import urllib.parse
import urllib.request
from typing import Any

from strata.errors import BY_KIND, ConfigError, CoordinatorError, CoordinatorUnavailable, StrataError
from strata.transport.credentials import CA_VARIABLE, CERT_VARIABLE, KEY_VARIABLE, ClientSecurity

DEFAULT_HTTP = "http://127.0.0.1:51051"
TIMEOUT_S = 15.0
MAX_ANSWER_BYTES = 64 << 20
_LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})


class HttpApi:
    """One coordinator, or a leader and its standbys, of which the leader answers."""

    def __init__(self, urls: str, *, security: ClientSecurity | None = None, timeout_s: float = TIMEOUT_S) -> None:
        """`urls`: one or several, separated by commas.

        Raises:
            ConfigError: One of them is not a URL of HTTP, or a certificate cannot be loaded.
        """
        self.urls = [_checked(url.strip()) for url in urls.split(",")]
        self._security = security or ClientSecurity()
        self._timeout_s = timeout_s
        self._openers = {url: _opener(url, self._security) for url in self.urls}

    def get(self, path: str, **query: object) -> Any:
        """Return the JSON of an answer; ask the coordinators in turn until the leader answers, as a standby refuses.

        Raises:
            CoordinatorUnavailable: None of them answers.
            StrataError: With what the coordinator has answered.
        """
        for num_left in range(len(self.urls), 0, -1):
            try:
                return self._get(self.urls[0], path, query)
            except CoordinatorUnavailable:
                self.urls.append(self.urls.pop(0))  # the next one may be the leader now
                if num_left == 1:
                    raise
        raise AssertionError("unreachable")

    def _get(self, url: str, path: str, query: dict[str, object]) -> Any:
        address = f"{url.rstrip('/')}{path}" + (f"?{urllib.parse.urlencode(query)}" if query else "")
        request = urllib.request.Request(address, headers=dict(self._security.metadata()))  # noqa: S310 - checked
        try:
            with self._openers[url].open(request, timeout=self._timeout_s) as response:
                return json.loads(_bounded(response.read(MAX_ANSWER_BYTES + 1)))
        except urllib.error.HTTPError as error:
            with error:
                raise _error_from(error.code, error.read(MAX_ANSWER_BYTES)) from error
        except (OSError, ValueError, http.client.HTTPException) as error:
            why = error.reason if isinstance(error, urllib.error.URLError) else error
            raise CoordinatorUnavailable(
                f"no coordinator answers at {url} ({why}); check that it is running and that this is its HTTP address"
            ) from error


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """A coordinator sends no redirects, and the token must not follow a redirect."""

    def redirect_request(self, *_: Any) -> None:
        return None


def _checked(url: str) -> str:
    try:
        parts = urllib.parse.urlsplit(url)
        is_url = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_url = False
    if not is_url:
        raise ConfigError(f"--http={url!r} is not an HTTP address; write it as http://HOST:PORT", field="http")
    return url


def _opener(url: str, security: ClientSecurity) -> urllib.request.OpenerDirector:
    handlers: list[urllib.request.BaseHandler] = [_NoRedirects()]
    parts = urllib.parse.urlsplit(url)
    if parts.scheme == "https":
        handlers.append(urllib.request.HTTPSHandler(context=_tls(security)))
    if parts.hostname in _LOOPBACK:  # a proxy would ask its own machine
        handlers.append(urllib.request.ProxyHandler({}))
    return urllib.request.build_opener(*handlers)


def _tls(security: ClientSecurity) -> ssl.SSLContext:
    ca = security.ca or os.environ.get(CA_VARIABLE) or None
    try:
        context = ssl.create_default_context(cafile=ca)
        if certificate := os.environ.get(CERT_VARIABLE):
            context.load_cert_chain(certificate, os.environ.get(KEY_VARIABLE) or None)
    except OSError as error:
        raise ConfigError(
            f"cannot load the certificates named by {CA_VARIABLE}, {CERT_VARIABLE} and {KEY_VARIABLE}: {error}"
        ) from error
    return context


def _bounded(body: bytes) -> bytes:
    if len(body) > MAX_ANSWER_BYTES:
        raise ValueError(f"the answer is longer than {MAX_ANSWER_BYTES:,} bytes")
    return body


def _error_from(code: int, body: bytes) -> StrataError:
    """Return the error that the coordinator answered with."""
    try:
        problem = json.loads(body)["error"]
        return BY_KIND.get(problem["kind"], CoordinatorError)(problem["message"], field=problem["field"])
    except (ValueError, KeyError, TypeError):
        return CoordinatorError(
            f"got HTTP {code}, not an answer of a coordinator; check that --http is the coordinator's HTTP address"
        )
