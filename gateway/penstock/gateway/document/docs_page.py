"""The OpenAPI and AsyncAPI documents, and `GET /docs`: the former as a page, without scripts and other hosts."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from html import escape
from typing import Any
from weakref import WeakKeyDictionary

from fastapi import APIRouter, FastAPI, Request
from starlette.responses import HTMLResponse, Response

from penstock.gateway.context import context_of_app
from penstock.gateway.document import error_codes
from penstock.gateway.document.asyncapi import asyncapi, configured_asyncapi
from penstock.schemas.errors import PenstockError

router = APIRouter()

_HEADERS = {"content-security-policy": "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'"}
_STYLE = """
:root { color-scheme: light dark; font: 15px/1.5 system-ui, sans-serif }
body { max-width: 62rem; margin: 2rem auto; padding: 0 1rem }
h2 { margin-top: 2.5rem; border-bottom: 1px solid color-mix(in srgb, currentColor 20%, transparent) }
code, pre { font: 13px/1.45 ui-monospace, monospace }
pre { overflow: auto; padding: .7rem; background: color-mix(in srgb, currentColor 7%, transparent); border-radius: 6px }
summary { cursor: pointer; padding: .25rem 0 }
summary b { display: inline-block; min-width: 4.2rem }
details details { margin-left: 1.2rem }
table { border-collapse: collapse; margin: .4rem 0 }
tr:target { background: color-mix(in srgb, currentColor 12%, transparent) }
td, th { text-align: left; vertical-align: top; padding: .15rem 1rem .15rem 0 }
"""


@router.get("/openapi.json", include_in_schema=False)
async def openapi(request: Request) -> Response:
    """The document as JSON."""
    made = await _made(request)
    return Response(made.document, media_type="application/json")


@router.get("/asyncapi.json", include_in_schema=False)
async def events(request: Request) -> Response:
    """The AsyncAPI document, with the prefix of this installation's topics.

    Callers with a key, and all where there are no keys, get the topics of `[[queues]]` and webhooks too.
    """
    made, is_known = await _made(request), True
    try:
        context_of_app(request.app).policy.authenticate(request.headers)
    except PenstockError:
        is_known = False
    content = made.configured_events if is_known else made.events
    return Response(content, media_type="application/json", headers={"cache-control": "private, no-cache"})


@router.get("/docs", include_in_schema=False)
async def docs(request: Request) -> HTMLResponse:
    """The document as a page."""
    made = await _made(request)
    return HTMLResponse(made.page, headers=_HEADERS)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Made:
    """All forms, as bytes."""

    document: bytes
    events: bytes
    configured_events: bytes
    page: bytes


async def _made(request: Request) -> _Made:
    """Made once for each process, in a tenth of a second: on a thread, so that others are served meanwhile."""
    app: FastAPI = request.app
    return _MADE.get(app) or await asyncio.to_thread(_make_once, app)


def _make_once(app: FastAPI) -> _Made:
    with _ONE_AT_A_TIME:  # two at once would complete the same document twice
        if app not in _MADE:
            _MADE[app] = _make(app)
        return _MADE[app]


def _make(app: FastAPI) -> _Made:
    document = app.openapi()
    settings = context_of_app(app).settings
    events, configured = asyncapi(settings.kafka.topic_prefix), configured_asyncapi(settings)
    return _Made(
        document=_bytes(document),
        events=_bytes(events),
        configured_events=_bytes(configured),
        page=page(document).encode(),
    )


def _bytes(document: dict[str, Any]) -> bytes:
    return json.dumps(document, ensure_ascii=False).encode()


_MADE: WeakKeyDictionary[FastAPI, _Made] = WeakKeyDictionary()
_ONE_AT_A_TIME = threading.Lock()


def page(document: dict[str, Any]) -> str:
    info = document["info"]
    title, summary = escape(info["title"]), escape(info.get("summary", ""))
    parts = [
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title>',
        f'<meta name="viewport" content="width=device-width"><style>{_STYLE}</style>',
        f"<h1>{title}</h1><p>{summary}. ",
        'As documents for tools: <a href="/openapi.json">/openapi.json</a> (OpenAPI), and '
        '<a href="/asyncapi.json">/asyncapi.json</a> (AsyncAPI) of the topics and the WebSocket. '
        "Keys go into <code>Authorization: Bearer …</code>.</p>",
    ]
    for tag, operations in _by_tag(document).items():
        parts.append(f"<h2>{escape(tag)}</h2>")
        parts += [_operation(*operation) for operation in operations]
    parts += [error_codes.section(), "<h2>schemas</h2>"]
    for name, schema in document["components"]["schemas"].items():
        parts.append(
            f'<details id="{escape(name)}"><summary><code>{escape(name)}</code></summary>{_code(schema)}</details>'
        )
    return "\n".join(parts)


def _by_tag(document: dict[str, Any]) -> dict[str, list[tuple[str, str, dict[str, Any]]]]:
    found: dict[str, list[tuple[str, str, dict[str, Any]]]] = {}
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            tag = (operation.get("tags") or ["other"])[0]
            found.setdefault(tag, []).append((method.upper(), path, operation))
    return found


def _operation(method: str, path: str, operation: dict[str, Any]) -> str:
    about = escape(operation.get("summary", ""))
    parts = [f"<details><summary><b>{method}</b> <code>{escape(path)}</code> {about}</summary>"]
    if operation.get("description"):
        parts.append(f"<p>{escape(operation['description'])}</p>")
    if operation.get("parameters"):
        parts.append(
            f"<table><tr><th>parameter<th>in<th>type<th>{''.join(_parameters(operation['parameters']))}</table>"
        )
    for kind, content in operation.get("requestBody", {}).get("content", {}).items():
        parts.append(_content("body", kind, content["schema"]))
    for status, answer in operation["responses"].items():
        contents = answer.get("content", {})
        parts += [_content(status, kind, content["schema"]) for kind, content in contents.items()]
        if not contents:
            parts.append(f"<p>{escape(status)} {escape(answer['description'])}</p>")
    return "\n".join([*parts, "</details>"])


def _parameters(parameters: list[dict[str, Any]]) -> Iterator[str]:
    for one in parameters:
        schema = json.dumps(one["schema"], ensure_ascii=False)
        about = escape(one.get("description", ""))
        yield f"<tr><td><code>{escape(one['name'])}</code><td>{one['in']}<td><code>{escape(schema)}</code><td>{about}"


def _content(label: str, kind: str, schema: dict[str, Any]) -> str:
    reference = schema.get("$ref", "").rpartition("/")[2]
    head = f"{escape(label)} · {escape(kind)}"
    if reference:
        return f'<p>{head}: <a href="#{escape(reference)}"><code>{escape(reference)}</code></a></p>'
    return f"<details><summary>{head}</summary>{_code(schema)}</details>"


def _code(schema: Any) -> str:
    return f"<pre>{escape(json.dumps(schema, indent=2, ensure_ascii=False))}</pre>"
