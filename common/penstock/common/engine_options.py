"""What an option of an engine takes: a word for people, and the check. The engines read what has passed it."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

from penstock.schemas.texts import shortened


@dataclass(frozen=True, slots=True)
class Option:
    """The values that one option takes."""

    takes: str
    """In words, as error messages and docs/reference/engine-options.md have it."""
    accepts: Callable[[Any], bool]


Options = Mapping[str, Option]
"""By name."""

_HEADER = re.compile(r"[!#$%&'*+.^_`|~A-Za-z0-9-]{1,100}")
_NEVER_CALLERS = frozenset(
    {
        "accept-encoding", "api-key", "authorization", "connection", "content-encoding", "content-length",
        "content-type", "cookie", "expect", "forwarded", "host", "keep-alive", "proxy-authorization",
        "proxy-connection", "set-cookie", "te", "trailer", "transfer-encoding", "upgrade", "x-api-key",
    }
)  # fmt: skip
"""Headers that no caller may set, whatever an entry says."""


def whole(least: int, most: int | None = None) -> Option:
    """A whole number; 4.0 is one, because JSON has no other type for numbers."""
    bounds = f"of at least {least}" if most is None else f"from {least} to {most}"
    return Option(
        f"a whole number {bounds}",
        lambda value: _is_number(value) and value == int(value) and least <= value <= (value if most is None else most),
    )


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_argument(value: Any) -> bool:
    """A text, or a number that becomes one."""
    return isinstance(value, str) or _is_number(value)


def _is_header(value: Any) -> bool:
    if not isinstance(value, Mapping):
        return _is_argument(value)
    secret = cast("Mapping[str, Any]", value)
    return set(secret) == {"env"} and isinstance(secret["env"], str)


def _is_header_names(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(name, str) and _HEADER.fullmatch(name) and name.lower() not in _NEVER_CALLERS
        for name in cast("list[Any]", value)
    )


def _is_command(value: Any) -> bool:
    return isinstance(value, str) or (isinstance(value, list) and all(map(_is_argument, cast("list[Any]", value))))


def _table_of(is_item: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, Mapping) and all(map(is_item, cast("Mapping[str, Any]", value).values()))


def one_of(*texts: str) -> Option:
    return Option(" or ".join(f"`{text}`" for text in texts), lambda value: value in texts)


def names_for(*fields: str) -> Option:
    """A table with the server's names for some of these fields."""

    def is_name(value: Any) -> bool:
        return isinstance(value, str) and bool(value)

    def accepts(value: Any) -> bool:
        return _table_of(is_name)(value) and cast("Mapping[str, Any]", value).keys() <= set(fields)

    return Option(f"a table of the server's names for {', '.join(fields)}", accepts)


FLAG = Option("true or false", lambda value: isinstance(value, bool))
TEXT = Option("a text", lambda value: isinstance(value, str))
NUMBER = Option("a number of at least 0", lambda value: _is_number(value) and value >= 0)
ABOVE_ZERO = Option("a number above 0", lambda value: _is_number(value) and value > 0)
COMMAND = Option("a list of texts, or one line", _is_command)
VARIABLES = Option("a table of names and texts", _table_of(_is_argument))
HEADER_NAMES = Option("a list of names of headers; not those of credentials or of the connection", _is_header_names)
HEADERS = Option('a table of names, each with a text or {env = "NAME"}', _table_of(_is_header))


def wrong_option(known: Options, options: Mapping[str, Any]) -> str | None:
    """The first option that is unknown or has a wrong value, and what is right; None when all are right."""
    for name, value in options.items():
        if name not in known:
            return f"options.{name}: there is no such option; the options are {', '.join(sorted(known))}"
        if not known[name].accepts(value):
            return f"options.{name} takes {known[name].takes}{_shown(known[name], value)}"
    headers: Mapping[str, Any] = options.get("headers", {})
    secrets = {name.lower() for name, value in headers.items() if isinstance(value, Mapping)}
    for name in options.get("caller_headers", ()):
        if name.lower() in secrets:
            return f"options.caller_headers: {name} is a secret of options.headers, and callers may not send it"
    return None


def _shown(option: Option, value: Any) -> str:
    """What was given instead. Tables are not shown, nor what is in place of one: it may hold a secret."""
    if option in (HEADERS, VARIABLES) or isinstance(value, Mapping | list):
        return ""
    return f", not {shortened(repr(value), 40)}"
