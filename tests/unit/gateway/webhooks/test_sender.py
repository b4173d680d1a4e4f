"""A call never raises: neither for a URL of a caller nor for a response of a receiver."""

from __future__ import annotations

import asyncio
import base64
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest.mock import AsyncMock

import httpcore
import pytest
from pydantic import ValidationError

from penstock.gateway.callbacks import Callbacks, WebhooksSection
from penstock.gateway.webhooks.policy import Answer
from penstock.gateway.webhooks.sender import NAMES_OF_ONE, Sender, retry_after_s
from penstock.schemas.errors import InvalidRequest, UnsupportedParameter

KEY = "whsec_" + base64.b64encode(bytes(32)).decode()


async def address(_host: str, _port: int) -> list[str]:
    return ["93.184.215.14"]


def sender(*options: Any, timeout_s: float = 5) -> Sender:
    return Sender(Callbacks(WebhooksSection.model_validate({"secret": KEY})), timeout_s, *options)


async def post(sender: Sender, url: str = "http://x.example/", tenant: str = "t") -> Answer:
    return await sender.post(tenant, url, [], b"{}")


@pytest.mark.parametrize("host", ["a..com", "a" * 64 + ".com", ".x.com"])
async def test_a_name_that_cannot_be_resolved_is_an_answer(host: str) -> None:
    """Some stand on the topic: the worker keeps what it took from older producers."""
    assert await post(sender(), f"http://{host}/") == Answer(error="not reached, or broken off (OSError)")


async def test_an_unexpected_error_is_an_answer() -> None:
    network = httpcore.AsyncMockBackend([])
    network.connect_tcp = AsyncMock(side_effect=LookupError("x.example"))
    assert await post(sender(address, network)) == Answer(error="LookupError")


@pytest.mark.parametrize(("value", "seconds"), [(b"7", 7.0), (b"\xb2", None), (b"soon", None), (b"1" * 10, None)])
def test_retry_after(value: bytes, seconds: float | None) -> None:
    assert retry_after_s(value) == seconds


async def test_names_that_do_not_resolve_hold_up_one_tenant_only(monkeypatch: pytest.MonkeyPatch) -> None:
    let_go, asked = threading.Event(), list[str]()

    def slow(host: str, port: int, **_: object) -> list[object]:
        asked.append(host)
        if host.endswith("slow.example"):
            let_go.wait(30)
        raise socket.gaierror("no such name")

    monkeypatch.setattr(socket, "getaddrinfo", slow)
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(4))
    one = sender(timeout_s=0.5)
    try:
        calls = [post(one, f"http://h{number}.slow.example/", "evil") for number in range(32)]
        answers = await asyncio.gather(*calls)
        assert {answer.error for answer in answers} == {"no answer within 0.5 s"}
        assert len(asked) == NAMES_OF_ONE, "a lookup counts until it has ended, not until its call has"
        assert await asyncio.wait_for(asyncio.to_thread(lambda: "made"), 2) == "made"
        assert (await post(one, "http://fast.example/", "good")).error == "not reached, or broken off (gaierror)"
    finally:
        let_go.set()
        one.close()


# -- which callbacks are accepted, told from the settings and the URL alone


OTHER = "whsec_" + base64.b64encode(bytes(range(24))).decode()


@pytest.mark.parametrize(
    "secret", ["whsec_", "whsec_…", "whsec_AAAA", KEY.removeprefix("whsec_"), [], [KEY, "x"], KEY + "A" * 90]
)
def test_a_secret_that_signs_badly_is_refused_and_not_shown(secret: object) -> None:
    with pytest.raises(ValidationError) as caught:
        WebhooksSection.model_validate({"secret": secret})
    assert "whsec_ and the base64" in str(caught.value.errors()[0]["msg"])


def test_a_tenant_has_its_own_secrets_or_the_common_one() -> None:
    callbacks = Callbacks(WebhooksSection.model_validate({"secret": KEY, "secrets": {"acme": [OTHER, KEY]}}))
    assert callbacks.secrets("acme") == [OTHER, KEY]
    assert callbacks.secrets("other") == [KEY]
    with pytest.raises(UnsupportedParameter, match=r"webhooks\.secret"):
        Callbacks(WebhooksSection.model_validate({"secrets": {"acme": OTHER}})).check("other", "https://x.example/")
    assert WebhooksSection.model_validate({"secret": ""}).secret is None


ALLOWED = [
    "https://hooks.example.com/a?b=c",
    "http://8.8.8.8/",
    "http://10.0.0.7:8080/hook",
    "http://hooks.internal/",
]
REFUSED = [
    "https://hooks.example.com:8443/",
    "http://10.0.0.7/",
    "http://10.0.0.8:8080/",
    "http://127.0.0.1/",
    "http://localhost/",
    "http://a.localhost/",
    "http://[::1]/",
    "http://[::ffff:10.0.0.8]/",
    "http://169.254.169.254/latest/meta-data",
    "http://2.hooks.internal:81/",
]


@pytest.mark.parametrize("url", [*ALLOWED, *REFUSED])
def test_hosts(url: str) -> None:
    section = {"secret": KEY, "internal_hosts": ["10.0.0.7:8080", "hooks.internal"]}
    callbacks = Callbacks(WebhooksSection.model_validate(section))
    if url in ALLOWED:
        callbacks.check("default", url)
    else:
        with pytest.raises(InvalidRequest, match=r"webhooks\.internal_hosts"):
            callbacks.check("default", url)
