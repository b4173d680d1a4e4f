"""The cause of a failed load as operators see it: type and message, without secrets and paths of this machine."""

from __future__ import annotations

import re

from penstock.schemas.errors import PenstockError
from penstock.schemas.texts import shortened

LONGEST_CAUSE = 400
# URLs, then absolute and home paths, in quotes (where they may hold spaces) or without. A slash that follows a letter,
# a digit or another slash is inside a relative path or a hub id.
_PLACE = re.compile(
    r"\b(?P<scheme>[a-z][a-z0-9+.-]*)://(?P<rest>[^\s'\"]*)"
    r"|(?P<quote>['\"`])(?P<quoted>~?/[^'\"`\n]+)(?P=quote)"
    r"|(?<![\w./~-])(?P<path>~?/[^\s'\"`,;:()\[\]{}<>|]+)",
    re.IGNORECASE,
)


def cause_of(error: BaseException, source: str) -> str:
    """Type and message on one line; `source` is the model's own.

    The messages of Penstock's own errors are written for people: they stand alone.
    """
    message = shortened(without_places(str(error), source), LONGEST_CAUSE)
    if isinstance(error, PenstockError):
        return message
    return f"{type(error).__name__}: {message}" if message else type(error).__name__


def without_places(text: str, source: str) -> str:
    """The text with `…/name` for each path that is neither the source nor in it, and URLs without secrets."""

    def cut(match: re.Match[str]) -> str:
        if match["scheme"] is not None:
            return _cut_url(match["scheme"], match["rest"], source)
        quote = match["quote"] or ""
        return f"{quote}{_cut_path(match['quoted'] or match['path'], source)}{quote}"

    return _PLACE.sub(cut, text)


def _cut_path(path: str, source: str) -> str:
    own = source.rstrip("/")
    if own and (path == own or path.startswith(f"{own}/")):
        return path
    name = path.rstrip("/.").rpartition("/")[2]
    return f"…/{name}" if name else "…"


def _cut_url(scheme: str, rest: str, source: str) -> str:
    """A user with a password, and a query, may be secrets."""
    if scheme.lower() == "file":
        return _cut_path(rest, source)
    place, _, path = rest.partition("?")[0].partition("/")
    host = place.rpartition("@")[2]
    return f"{scheme}://{host}/{path}" if path else f"{scheme}://{host}"
