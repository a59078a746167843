"""Guard: refuses requests before their bodies are read.

It refuses them by framing, size of target and headers, host, origin, rate and key, in this order.
Connections, slow clients and fairness among addresses are the proxy's (`deploy/nginx.conf`).
"""

import ipaddress
import math
import re
from functools import partial
from itertools import chain
from urllib.parse import unquote_to_bytes

from fastapi.routing import APIRoute
from starlette.datastructures import Headers
from starlette.types import Scope as AsgiScope

from recsys.serving.auth import Keyring, Scope, scope_of
from recsys.serving.errors import ProblemError
from recsys.serving.limits import RateLimit
from recsys.serving.metrics import Metrics
from recsys.serving.settings import ServingSettings

METRICS = "/metrics"
MAX_TARGET = 8 * 1024
MAX_HEADERS = 64
MAX_HEADER_BYTES = 16 * 1024


class Guard:
    """The checks of one application."""

    def __init__(self, settings: ServingSettings, metrics: Metrics) -> None:
        """Accept the keys of the settings (none: every client), with a limit for each client."""
        self.metrics = metrics
        self.keys = None if settings.keys is None else Keyring(settings.keys)
        self.limit: RateLimit | None = None
        if settings.rate_limit is not None:
            self.limit = RateLimit(settings.rate_limit, settings.rate_burst)
        self.hosts = settings.hosts

    def check(self, scope: AsgiScope, headers: Headers) -> None:
        """Refuse a request, or note its key and how to charge its client.

        Raises:
            ProblemError: it is refused.
        """
        check_framing(scope.get("http_version"), headers)  # first: it ends the connection
        target = len(scope.get("raw_path") or b"") + len(scope["query_string"])
        if target > MAX_TARGET:
            raise ProblemError("target_too_long", f"The limit is {MAX_TARGET} bytes.")
        _check_encoding(scope)
        raw = scope["headers"]
        size = sum(map(len, chain.from_iterable(raw)))
        if len(raw) > MAX_HEADERS or size > MAX_HEADER_BYTES:
            text = f"The limits are {MAX_HEADERS} headers and {MAX_HEADER_BYTES} bytes."
            raise ProblemError("headers_too_large", text)
        self._check_host(headers, scope["path"])
        _check_origin(scope["method"], headers)
        route: APIRoute | None = scope["state"]["route"]
        if _is_health(scope):
            return  # orchestrators ask often, and without a key
        if len(headers.getlist("authorization")) > 1:
            raise _unauthenticated("There is more than one header Authorization.")
        shown = _bearer(headers)
        key = None if self.keys is None or shown is None else self.keys.find(shown)
        if key is not None:
            scope["state"]["key"] = key.name
        client = f"key {key.name}" if key is not None else _address(scope)
        if self.limit is not None:
            self._refuse(self.limit.take(client))
            scope["state"]["charge"] = partial(self._charge, self.limit, client)
        if self.keys is None:
            return
        needed = Scope.READ if route is None else scope_of(route.endpoint)
        if needed is Scope.PUBLIC:
            return
        if key is None:
            detail = (
                "Send 'Authorization: Bearer rk_...' with a key of this service."
                if shown is None
                else "The key is not one of this service's; it may be revoked or expired."
            )
            raise _unauthenticated(detail)
        if route is None or scope["method"] not in scope["state"]["methods"]:
            return  # the router answers 404 or 405
        if key.may < needed:
            detail = f"{scope['method']} {route.path_format} needs a key of scope {needed.word}."
            raise ProblemError("forbidden", f"{detail} This one is of scope {key.scope}.")

    def _check_host(self, headers: Headers, path: str) -> None:
        """Refuse host names that are not this service's (DNS rebinding).

        Orchestrators check the health by address, and metrics are scraped by address. A health
        check tells nothing, and an address as a host name is not the result of DNS.
        """
        hosts = headers.getlist("host")
        if len(hosts) > 1:
            raise ProblemError("unknown_host", "There is more than one header Host.")
        if not hosts or "*" in self.hosts or path.startswith("/health/"):
            return
        host = re.sub(r":\d+$", "", hosts[0]).lower().removesuffix(".").strip("[]")
        if path == METRICS and _is_address(host):
            return
        for allowed in self.hosts:
            if host == allowed or (allowed.startswith("*.") and host.endswith(allowed[1:])):
                return
        raise ProblemError(
            "unknown_host",
            f"The host {host[:60]!r} is not a name of this service (allowed_hosts).",
        )

    def _charge(self, limit: RateLimit, client: str, work: float) -> None:
        self._refuse(limit.charge(client, work))

    def _refuse(self, wait: float) -> None:
        if wait:
            self.metrics.rate_limited.inc()
            raise ProblemError(
                "rate_limited",
                "Too much work for this client; send fewer or smaller requests.",
                headers={"Retry-After": str(math.ceil(wait))},
            )


def _is_health(scope: AsgiScope) -> bool:
    route: APIRoute | None = scope["state"]["route"]
    return route is not None and route.path_format.startswith("/health/")


def check_framing(version: str | None, headers: Headers) -> None:
    """Refuse a body whose end two programs may see at different places (request smuggling).

    Implementations of HTTP differ in what they refuse themselves. A version that is not known is
    1.1.
    """
    lengths, codings = headers.getlist("content-length"), headers.getlist("transfer-encoding")
    is_chunked = [coding.strip().lower() for coding in codings] == ["chunked"]
    if (
        (lengths and codings)
        or len(lengths) > 1
        or not all(length.isdecimal() for length in lengths)
        or (codings and not (is_chunked and version in (None, "1.1")))
    ):
        raise ProblemError(
            "ambiguous_length",
            "Send one Content-Length, or 'Transfer-Encoding: chunked' with HTTP/1.1, not both.",
            headers={"Connection": "close"},
        )


def _check_origin(method: str, headers: Headers) -> None:
    """Refuse changes from pages of other origins (cross-site request forgery).

    Browsers send the header `Sec-Fetch-Site`; older ones, and all over plain HTTP, send only
    `Origin`. Other programs send neither and are accepted.
    """
    if method in ("GET", "HEAD"):
        return
    site, origin = headers.get("sec-fetch-site"), headers.get("origin")
    if site is not None:
        foreign = site not in ("same-origin", "none")
    else:
        host = headers.get("host", "").lower()
        foreign = origin is not None and origin.lower().partition("://")[2] != host
    if foreign:
        raise ProblemError("cross_origin", "A page of another origin may not send this.")


def _unauthenticated(detail: str) -> ProblemError:
    return ProblemError("unauthenticated", detail, headers={"WWW-Authenticate": "Bearer"})


def _check_encoding(scope: AsgiScope) -> None:
    """Refuse bytes that are not UTF-8: they would be replaced, and make different ids equal."""
    target = scope.get("raw_path") or b"", scope["query_string"]
    for part, written in zip(("path", "query"), target, strict=True):
        try:
            unquote_to_bytes(written).decode()
        except UnicodeDecodeError as error:
            bytes_in_hex = error.object[error.start : error.end].hex("%").upper()
            raise ProblemError(
                "malformed_target",
                f"The {part} has %{bytes_in_hex}, which is not UTF-8; write ü as %C3%BC, for "
                "example.",
            ) from None


def _bearer(headers: Headers) -> str | None:
    kind, _, secret = headers.get("authorization", "").partition(" ")
    return secret.strip() if kind.lower() == "bearer" else None


def _address(scope: AsgiScope) -> str:
    client = scope.get("client")
    return client[0] if client else "unknown"


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
