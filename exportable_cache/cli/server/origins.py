"""Checks of Host and Origin headers.

A page of another site can reach a local server in two ways. With DNS rebinding, the site's name resolves to 127.0.0.1,
so the `Host` of its requests is foreign. A cross-site request carries a foreign `Origin`.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from ...errors import InputError
from .responses import error_of

ANY = "*"
#: Longest header value that an error message repeats.
_SHOWN = 80


@dataclass(frozen=True)
class AllowedOrigins:
    """Names that requests may address, and origins other than the server's own that may send them.

    Attributes:
        hosts: Names without ports, compared with `Host`; None for any name.
        origins: Origins such as "https://example.org", compared with `Origin`; "*" allows every one.
    """

    hosts: frozenset[str] | None
    origins: frozenset[str] = frozenset()

    @classmethod
    def of(cls, address: str, has_key: bool, hosts: Iterable[str] = (), origins: Iterable[str] = ()) -> AllowedOrigins:
        """Return the names and origins to accept, depending on where the server listens.

        Args:
            address: Address of the server. On loopback without a key, only loopback names and `hosts` are accepted.
            has_key: True if requests carry an API key, which a foreign page does not know.
            hosts: Further names. If there are any, all other names are refused at any address.
            origins: Origins whose pages may send requests.

        Raises:
            InputError: If a name or an origin is not valid.
        """
        added = frozenset(_checked_host(host) for host in hosts)
        is_open = ANY in added or (not added and (has_key or not is_loopback(address)))
        allowed = None if is_open else added | {host_name(address) or address}
        return cls(allowed, frozenset(_checked_origin(origin) for origin in origins))

    def takes_host(self, value: str) -> bool:
        """Return True if a `Host` header is allowed."""
        if self.hosts is None:
            return True
        name = host_name(value)
        return name is not None and (is_loopback(name) or name in self.hosts)

    def takes_origin(self, value: str, host: str | None) -> bool:
        """Return True if an `Origin` header is the server's own, by its `Host`, or allowed."""
        origin = _normal(value)
        return (
            ANY in self.origins or origin in self.origins or (host is not None and _authority(origin) == host.lower())
        )


class OriginGuard:
    """Refuses requests under a foreign name or from a foreign page, and lets browsers know which pages may ask.

    Args:
        app: ASGI.
        allowed: Names and origins.
    """

    def __init__(self, app: ASGIApp, allowed: AllowedOrigins) -> None:
        self._allowed = allowed
        self._app = app
        if allowed.origins:
            self._app = CORSMiddleware(
                app,
                allow_origins=sorted(allowed.origins),
                allow_methods=("GET", "POST"),
                allow_headers=(ANY,),
                allow_private_network=True,
                expose_headers=("Retry-After",),
            )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuse a request with a foreign header, or pass it on."""
        if scope["type"] == "http" and (refusal := self._refusal(Headers(scope=scope))) is not None:
            await refusal(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _refusal(self, headers: Headers) -> JSONResponse | None:
        host, origin = headers.get("host"), headers.get("origin")
        # Every browser sends a Host. A client of HTTP/1.0 may not, but a page cannot use one.
        if host is not None and not self._allowed.takes_host(host):
            names = sorted(self._allowed.hosts or ())
            return _refused(
                421,
                f"Host must be a loopback name or one of {', '.join(names)}, got {host!r:.{_SHOWN}}; start the server "
                "with --allow-host NAME to answer to another name",
            )
        if origin is not None and not self._allowed.takes_origin(origin, host):
            return _refused(
                403,
                f"Origin must be this server's own, got {origin!r:.{_SHOWN}}; start the server with --allow-origin "
                "ORIGIN to take requests from pages of that site",
            )
        return None


def _refused(status: int, message: str, **more: Any) -> JSONResponse:
    return JSONResponse(error_of(message, **more), status)


def is_loopback(address: str) -> bool:
    """Return True if a name or an address always means this computer."""
    name = host_name(address)
    if name is None:
        return False
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return name == "localhost" or name.endswith(".localhost")


def host_name(value: str) -> str | None:
    """Return the name of `Host: name:port` in small letters, without brackets and port, or None if there is none."""
    text = value.strip().lower()
    if text.startswith("["):
        name, bracket, rest = text[1:].partition("]")
        return name if bracket and (not rest or _is_port(rest)) else None
    if text.count(":") > 1:
        # An IPv6 address without brackets, as --host takes it.
        return text
    name, colon, port = text.partition(":")
    return name.rstrip(".") or None if not colon or _is_port(colon + port) else None


def _is_port(text: str) -> bool:
    return text[:1] == ":" and (text[1:] == "" or (text[1:].isascii() and text[1:].isdigit()))


def _authority(origin: str) -> str | None:
    try:
        parts = urlsplit(origin)
    except ValueError:
        return None
    return parts.netloc if parts.scheme in ("http", "https") else None


def _normal(origin: str) -> str:
    return origin.strip().lower().rstrip("/")


def _checked_host(host: str) -> str:
    name = host_name(host)
    if host != ANY and (name is None or any(character in name for character in "/@*, ")):
        raise InputError(f"--allow-host must be a name such as example.org, got {host!r}; leave out scheme and path")
    return ANY if host == ANY else str(name)


def _checked_origin(origin: str) -> str:
    normal = _normal(origin)
    scheme, mark, rest = normal.partition("://")
    if normal not in (ANY, "null") and not (scheme and mark and rest and "/" not in rest and " " not in rest):
        raise InputError(
            f"--allow-origin must be an origin such as https://example.org or http://localhost:3000, got {origin!r}; "
            "pass scheme, name and port, without a path"
        )
    return normal
