"""Which URLs may be fetched at all, judged by the URL alone. Pure; the addresses of its host are checked at connect."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import httpx

from penstock.schemas.errors import InvalidRequest

MAX_URL_CHARS = 2_000
_PORTS = {"http": 80, "https": 443}


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """A URL that may be fetched: its host, as its certificate and Host header name it, and where that listens."""

    url: str
    scheme: str
    host: str
    """In ASCII, an internationalized one in punycode; an address of IPv6 without brackets."""
    port: int
    path: bytes
    host_header: bytes
    internal: bool
    """Its host was named as one inside the cluster: it may have a private address."""


@dataclass(frozen=True, slots=True)
class UrlRules:
    """Which hosts may be named.

    `allow_hosts`: names (`images.example.com`), all names below one (`.example.com`), or `*`; at public addresses only.
    `internal_hosts`: exact names (or addresses) of hosts inside the cluster, which may have private addresses.
    An entry may end in `:port`; without it the scheme's usual port is meant.
    """

    allow_hosts: Sequence[str] = ()
    internal_hosts: Sequence[str] = ()
    closed_hint: str = "images are not fetched from URLs here; send the bytes, or upload them to /v1/artifacts"
    """The message for a caller where no host may be named."""
    purpose: str = "images may come from"
    """What allowed hosts are for, in a refusal."""

    def target(self, text: str, *, param: str, after: Target | None = None) -> Target:
        """The URL, allowed; `after` is the one that redirected to it. Raises InvalidRequest naming `param`."""
        if not self.allow_hosts and not self.internal_hosts:
            raise InvalidRequest(f"{param}: {self.closed_hint}", param=param)
        url = _parsed(text, param, after)
        host, port = url.raw_host.decode("ascii").rstrip(".").lower(), url.port or _PORTS[url.scheme]
        internal = _listed(self.internal_hosts, host, port, url.scheme, suffixes=False)
        if not internal and not _listed(self.allow_hosts, host, port, url.scheme, suffixes=True):
            raise InvalidRequest(
                f"{param}: {_shown(host)}:{port} is not among the hosts that {self.purpose}", param=param
            )
        return Target(
            url=str(url),
            scheme=url.scheme,
            host=host,
            port=port,
            path=url.raw_path,
            host_header=url.netloc,
            internal=internal,
        )


def _parsed(text: str, param: str, after: Target | None) -> httpx.URL:
    if len(text) > MAX_URL_CHARS:
        raise InvalidRequest(f"{param} has more than {MAX_URL_CHARS} characters", param=param)
    try:
        url = httpx.URL(text) if after is None else httpx.URL(after.url).join(text)
        host = url.host
    except (httpx.InvalidURL, UnicodeError, ValueError) as error:
        raise InvalidRequest(f"{param} is not a URL", param=param) from error
    if url.scheme not in _PORTS:
        raise InvalidRequest(f"{param} must be a URL of http or https", param=param)
    if not host:
        raise InvalidRequest(f"{param} names no host", param=param)
    if url.userinfo:
        raise InvalidRequest(f"{param} holds a user name or password: that is not allowed", param=param)
    if after is not None and after.scheme == "https" and url.scheme == "http":
        raise InvalidRequest(f"{param} redirects from https to http", param=param)
    return url


def _listed(entries: Sequence[str], host: str, port: int, scheme: str, *, suffixes: bool) -> bool:
    for entry in entries:
        name, at = _entry(entry)
        if port != (at or _PORTS[scheme]):
            continue
        if name == host or (suffixes and (name == "*" or (name.startswith(".") and host.endswith(name)))):
            return True
    return False


def _entry(text: str) -> tuple[str, int | None]:
    """(name, port) of an entry; an address of IPv6 with a port is in brackets."""
    name, colon, port = text.strip().lower().rpartition(":")
    if colon and port.isdigit() and (name.startswith("[") or ":" not in name):
        return name.strip("[]").rstrip("."), int(port)
    return text.strip().lower().strip("[]").rstrip("."), None


def _shown(host: str) -> str:
    return host[:100].encode(errors="backslashreplace").decode()
