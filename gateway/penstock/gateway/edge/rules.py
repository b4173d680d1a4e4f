"""What holds for each route before its code runs: who may call it, which body it takes, how long an exchange may last.

The table is declared beside the OpenAPI document (`document.described_routes`); the edge asks it once per exchange.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import Literal

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route, WebSocketRoute
from starlette.types import Scope as AsgiScope

from penstock.gateway.edge.tickets import Use

Scope = Literal["read", "submit", "cancel", "admin"]
"""What a key may do."""
Endpoint = Callable[[Request], Awaitable[Response]]
RouteKey = tuple[str, str]
"""(method, path with its parameters in braces); the method of a WebSocket is `WEBSOCKET`."""

WEBSOCKET = "WEBSOCKET"
_SEVERAL_WORDS = re.compile(r"\{(\w+):path\}")


class Access(Enum):
    PROBE = auto()
    """Everybody, under any Host and without limits: orchestrators."""
    PUBLIC = auto()
    """Everybody, within the limits of an address."""
    SCRAPER = auto()
    """As PUBLIC, without a slot unless it brings a body: slow clients of other routes do not keep metrics back."""
    CALLER = auto()
    """Who has a key, or everybody where there are no keys."""


class Takes(Enum):
    """The body of a route: it decides how large it may be, and how slowly it may come."""

    NOTHING = auto()
    """None is read; what stock clients send all the same is small."""
    JSON = auto()
    """It is parsed on the event loop, so it is small whatever its content type says."""
    LARGE_JSON = auto()
    """JSON in which a few texts may be long, as images in base64: `gateway.max_large_body_bytes`."""
    FORM = auto()
    """multipart/form-data with files that lie on the disk while they come; any other content type as LARGE_JSON."""
    FILE = auto()
    """Bytes that stream into the store."""
    LINES = auto()
    """Lines that are read one by one, or a form with a file of them: `gateway.max_batch_bytes`."""


class Lasts(Enum):
    SHORT = auto()
    WAITING = auto()
    """As long as a request runs if it has a query, since any may hold a `wait` (`wa%69t=60` is one too)."""
    OUTCOME = auto()
    """As long as a request runs."""


class Narrowed(Enum):
    """What becomes of a caller whose ticket reaches only some of its tenant's requests."""

    REFUSED = auto()
    """The route shows or changes more than such a ticket reaches."""
    BY_PATH = auto()
    """The request or conversation that the path names must be within the ticket."""
    BY_ROUTE = auto()
    """What stands behind the route asks the caller (`check_new`, `reaches`), or there is nothing to narrow."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rules:
    """What the edge holds one route to.

    `scope`: what the caller's key needs; None: any key. `hot`: called for plain calls, without the framework.
    `query`: parameters of the query string that are not in the endpoint's signature. `tickets`: uses of tickets that
    are accepted as `?ticket=`. `shared`: callers may get an answer that was made for others (`edge.shared_answers`).
    """

    access: Access = Access.CALLER
    scope: Scope | None = None
    takes: Takes = Takes.NOTHING
    lasts: Lasts = Lasts.SHORT
    hot: Endpoint | None = None
    query: frozenset[str] = frozenset()
    tickets: frozenset[Use] = frozenset()
    narrowed: Narrowed = Narrowed.REFUSED
    shared: bool = False
    path: str = ""
    """The route's own, as documents show it."""

    def is_audited(self, method: str) -> bool:
        """Whether the exchange is an operator's that changes something: all of these are recorded."""
        return self.scope == "admin" and method not in ("GET", "HEAD", WEBSOCKET)

    def lasts_long(self, scope: AsgiScope) -> bool:
        """Whether this exchange may last as long as a request runs."""
        return self.lasts is Lasts.OUTCOME or (self.lasts is Lasts.WAITING and bool(scope["query_string"]))


UNKNOWN = Rules(access=Access.PUBLIC)
"""A path that no route has, or a method that it has not: the answer says so, with or without a key.

Such an exchange never reaches the framework, whose matching is laxer: `$` there also takes a line's end behind a path.
"""


def rules_of(scope: AsgiScope) -> Rules:
    """What the edge found for an exchange."""
    return scope["state"]["rules"]


class RouteTable:
    """Rules by method and path. A HEAD has those of its GET."""

    def __init__(self, declared: Mapping[RouteKey, Rules]) -> None:
        declared = {key: replace(rules, path=shown_path(key[1])) for key, rules in declared.items()}
        self._declared = declared
        self._patterns: dict[str, tuple[re.Pattern[str], list[Rules]]] = {}
        for method in {method for method, _ in declared}:
            found = [(path, rules) for (one, path), rules in declared.items() if one == method and "{" in path]
            if found:
                pattern = re.compile("|".join(f"(?P<r{n}>{_pattern(path)})" for n, (path, _) in enumerate(found)))
                self._patterns[method] = pattern, [rules for _, rules in found]

    def rules(self, method: str, path: str) -> Rules:
        """Those of the route that answers, in the order of the declaration; UNKNOWN if there is none."""
        if method == "HEAD":
            method = "GET"
        found = self._find(method, path)
        if found is UNKNOWN and path.endswith("/"):  # the framework leads to the path without it
            return self._find(method, path[:-1])
        return found

    def _find(self, method: str, path: str) -> Rules:
        exact = self._declared.get((method, path))
        if exact is not None:
            return exact
        pattern, rules = self._patterns.get(method, (None, ()))
        found = None if pattern is None else pattern.fullmatch(path)
        return UNKNOWN if found is None or found.lastgroup is None else rules[int(found.lastgroup[1:])]

    def methods(self, path: str) -> list[str]:
        """Those that a path has."""
        methods = sorted({method for method, _ in self._declared} - {WEBSOCKET})
        return [method for method in methods if self.rules(method, path) is not UNKNOWN]


def _pattern(path: str) -> str:
    """A regular expression without groups of its own for a path."""
    words = re.split(r"(\{\w+(?::path)?\})", path)
    return "".join((".+" if ":path" in word else "[^/]+") if word[:1] == "{" else re.escape(word) for word in words)


def check_declared(routes: Iterable[BaseRoute], declared: Iterable[RouteKey]) -> None:
    """Raises LookupError for a route that was not declared and for a declaration without a route."""
    there = {key for route in routes for key in _keys_of(route)}
    declared = set(declared)
    if there - declared:
        raise LookupError(f"routes without a declaration in described_routes: {sorted(there - declared)}")
    if declared - there:
        raise LookupError(f"declarations without a route: {sorted(declared - there)}")


def _keys_of(route: BaseRoute) -> list[RouteKey]:
    if isinstance(route, WebSocketRoute):
        return [(WEBSOCKET, route.path)]
    if isinstance(route, Route):
        return [(method, route.path) for method in sorted(route.methods or ()) if method != "HEAD"]
    raise LookupError(f"a route of a kind that cannot be declared: {route!r}")


def shown_path(path: str) -> str:
    """A path as documents show it, without the kinds of its parameters."""
    return _SEVERAL_WORDS.sub(r"{\1}", path)
