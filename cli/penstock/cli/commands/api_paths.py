"""Paths of the gateway's routes. The parts that a person or another program chose are escaped here, and only here."""

from __future__ import annotations

from typing import LiteralString, NewType
from urllib.parse import quote

from penstock.cli.failures import CliFailure, ExitCode

ApiPath = NewType("ApiPath", str)
"""A path whose variable parts are escaped."""
Route = LiteralString | ApiPath
"""What `Gateway` takes as a path. pyright rejects an f-string with an id in it, which is a plain `str`."""


def api_path(root: LiteralString, *segments: str | int) -> ApiPath:
    """`root` and one segment for each of the others: an id, or the name of a subordinate route.

    Servers decode a path before they choose the route, so an escaped slash can reach another route too. No id has a
    slash, and none is empty or a dot segment: these raise CliFailure (usage).
    """
    return ApiPath("/".join((root, *(_segment(str(one)) for one in segments))))


def named_path(root: LiteralString, name: str, *segments: str) -> ApiPath:
    """The path of something whose name may have slashes, as a model of the hub has. Raises CliFailure (usage)."""
    return api_path(root, *name.split("/"), *segments)


def _segment(text: str) -> str:
    if text in ("", ".", "..") or "/" in text:
        raise CliFailure(f"{text!r} cannot be an id: write it as it was printed", exit_code=ExitCode.USAGE)
    return quote(text, safe="", errors="surrogateescape")
