"""Every route reads its body by one reader: what JSON cannot hold is refused with its place, and nothing is done."""

from __future__ import annotations

from functools import cache

import httpx
import pytest
from fastapi import FastAPI
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic_core import from_json

from kit.examples import examples
from kit.gateway_http import client, gateway_app
from penstock.gateway.app import ROUTERS
from penstock.gateway.document.described_routes import ROUTES, TABLE
from penstock.gateway.edge.rules import Takes

JSON = (Takes.JSON, Takes.LARGE_JSON, Takes.FORM)
NO_JSON = ("/v1/files", "/v1/images/edits", "/v1/images/variations")
PATHS = sorted(
    path.replace("{", "").replace("}", "").replace(":path", "")
    for method, path in ROUTES
    if method == "POST" and TABLE.rules(method, path).takes in JSON and path not in NO_JSON
)
UNREAD = ("/v1/admin/models", "/v1/requests")
"""Without a broker they answer before they read."""
FIELDS = ("prompt_cache_key", "safety_identifier", "tool_choice", "metadata", "user", "model", "input", "messages")
NAMES = st.sampled_from(FIELDS) | st.text("abc", min_size=1, max_size=3)
ODD = st.sampled_from(["NaN", "Infinity", "-Infinity", "1e999", "9" * 5_000, r'"\ud83d"', r'"a\udc00"', r'["\ud800"]'])


@cache
def app() -> FastAPI:
    return gateway_app(*ROUTERS, hot=True)


async def post(path: str, content: bytes) -> httpx.Response:
    async with client(app()) as http:
        return await http.post(path, content=content, headers={"content-type": "application/json"})


def refused(answer: httpx.Response) -> tuple[int, str | None, str]:
    """Its status, param and message, read as strictly as JSON is defined."""
    body = from_json(answer.content, allow_inf_nan=False)
    error = body.get("error", {"param": None} | body)  # a registry's shape has no param
    return answer.status_code, error["param"], error["message"]


@pytest.mark.parametrize("path", PATHS)
@settings(max_examples=examples(40), deadline=None)
@given(st.lists(NAMES, min_size=1, max_size=3), ODD)
async def test_what_json_cannot_hold_is_refused_by_its_place(path: str, at: list[str], odd: str) -> None:
    text = odd
    for name in reversed(at):
        text = f'{{"id": 1, "{name}": {text}}}'
    place = ".".join(at) + ("[0]" if odd[0] == "[" else "")
    status, param, message = refused(await post(path, text.encode()))
    told = message.startswith(place) if path.startswith("/registry/") else param == place
    assert (told and status == 400) or (status == 503 and path in UNREAD), message


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("content", [b"{", b"\xff", b"[" * 20_000, b'{"a":' * 300 + b"1" + b"}" * 300])
async def test_what_is_no_json_is_refused(path: str, content: bytes) -> None:
    status, param, _ = refused(await post(path, content))
    assert (status, param) == (400, None) or (status == 503 and path in UNREAD)
