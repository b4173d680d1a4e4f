"""Serves the page and its modules from the package. No script of a page, and nothing of another host, may run in it."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable

from fastapi import APIRouter, Request
from starlette.responses import RedirectResponse, Response

from penstock.schemas.errors import NotFound

router = APIRouter(include_in_schema=False)

TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
}
HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data: blob:;"
        " base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}
INDEX = "index.html"


@dataclass(frozen=True, slots=True)
class _File:
    content: bytes
    media_type: str
    etag: str


@router.get("/")
async def root(request: Request) -> Response:
    """The page for browsers; other clients are led to the documentation of the routes."""
    return _answer(request, INDEX) if _is_browser(request) else RedirectResponse("/docs")


@router.get("/console")
async def console(request: Request) -> Response:
    """The page. What it shows stands behind `#` in the address, so that this is its only path."""
    return _answer(request, INDEX)


@router.get("/console/{name:path}")
async def asset(request: Request, name: str) -> Response:
    """A module or the style sheet; any other path leads browsers to the page that it names. Raises NotFound."""
    if _is_browser(request) and not name.endswith(tuple(TYPES)):
        return RedirectResponse(f"/console#/{name}")
    return _answer(request, name)


def _is_browser(request: Request) -> bool:
    return "text/html" in request.headers.get("accept", "")


def _answer(request: Request, name: str) -> Response:
    found = _files().get(name)
    if found is None:
        raise NotFound(f"the console has no file {name[:100]!r}")
    headers = {**HEADERS, "etag": found.etag}
    if request.headers.get("if-none-match") == found.etag:
        return Response(status_code=304, headers=headers)
    return Response(found.content, media_type=found.media_type, headers=headers)


@cache
def _files() -> dict[str, _File]:
    """Read once."""
    return {
        name: _File(content, TYPES[name[name.rindex(".") :]], f'"{hashlib.sha256(content).hexdigest()[:16]}"')
        for name, content in _read(files("penstock.gateway.console") / "static", "")
    }


def _read(folder: Traversable, prefix: str) -> list[tuple[str, bytes]]:
    found: list[tuple[str, bytes]] = []
    for one in folder.iterdir():
        if one.is_dir():
            found += _read(one, f"{prefix}{one.name}/")
        elif f".{one.name.rpartition('.')[2]}" in TYPES:
            found.append((prefix + one.name, one.read_bytes()))
    return found
